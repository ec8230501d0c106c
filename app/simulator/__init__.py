"""Plays a workload through a policy in virtual time. No Ray, no vLLM: the decisions are the live scheduler's own.

`python -m app.simulator --help` lists the options. The layers, pure ones first:

    errors, job, setup          what is simulated
    table, lengths, workload    where requests come from: traces, distributions, caps
    costs, hardware, profiles   what takes how long; calibrate, fits and measurements make such costs
    steps, batch, gaps, engine  one replica: decoding, chunked prefill, preemption
    links, moving, boundaries   moves: shared links, pre-copy, the choice of path
    loop, news, live, replicas  virtual time, and what there is in it
    world, execution            decisions, and what becomes of them
    observer, recorder, metrics, statistics, demand    what is measured
    options, order, runs, document, text, listing      the command line
"""
