"""Routing by content: the processor time of placements, and sessions on live replicas beside other routers.

Replicas are real except for their engine, which runs at the pace of a GPU without one (`deployments.engine.paced`). The
modules, in the order of the data:

    placing     the processor time of a placement
    case        systems, made-up sessions and conditions as values
    live        carries out one run: sends the sessions to a system, and observes
    predict     the simulator on the same sessions
    report      figures of runs, and tables

`python -m benchmarks.routing --help` lists the options.
"""
