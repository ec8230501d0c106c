"""Plans: the GPUs that a workload needs at a service level, with Mell, with other autoscalers, and at least.

`mell plan`, `python -m simulator.planning` and the simulator's option `--plan` are this room; nothing else imports
it. It imports the command's options and runs, the world, the fleets and the outcome. A workload and a level come in; a
JSON document, a table and a picture go out. Pure parts first:

    cases                      the configurations to compare, as values
    oracle                     the fewest GPU-seconds with knowledge of the trace
    frontier                   the best cases of each contender, and comparisons at equal service
    sweep                      the cases that depend on the outcomes of others
    document, text, picture    the output
    perform, report, __main__  the runs; the whole plan; the command line
"""
