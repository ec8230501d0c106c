"""GPU-seconds and service quality of the closed loop, against scaling without migration.

Replicas are real except for their engine, which runs at the pace of a GPU without one (`deployments.engine.paced`):
Serve, scheduler, ingress and migrations are the application's own. The modules, in the order of the data:

    case        runs as values: a variant of the application, a window of a trace, the conditions; their order
    measure     carries out one run
    external    an autoscaler beside the application, for variants in which neither Mell nor Serve scales
    observed    observations of a run, and the file of runs
    figures     figures of a run
    predict     the simulator on the same requests, calibrated by the runs
    frontier    plans of the windows: the best settings of every contender
    report      tables

`python -m benchmarks.economics --help` lists the options.
"""
