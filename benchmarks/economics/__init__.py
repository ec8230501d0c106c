"""What requests cost in GPU-seconds, and how they are served for it: the closed loop against scaling without it.

Replicas are real in all but their engine, which keeps the pace of a GPU without having one
(`deployments.engine.paced`): Serve, scheduler, ingress and migrations are the application's own. The layers:

    case        what is run: a variant of the application, a window of a trace, the conditions; in which order
    observed    what a run showed, and the file of runs
    figures     what that amounts to
    measure     carries out one run
    predict     the simulator on the same requests, calibrated by what the runs showed
    report      tables

`python -m benchmarks.economics --help` lists the options.
"""
