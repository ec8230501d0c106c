"""The simulator: plays a workload through a policy in virtual time, without Ray and vLLM.

The decisions come from the live scheduler's own decision function.

`python -m simulator --help` lists the options. The package imports `policies`, `migration.protocol` and `client`; only
benchmarks import it, and `mell` runs its commands as programs. The rooms, pure ones first:

    traces      files of requests in public formats; the replay reads them here, too
    workload    requests: traces, distributions of arrivals and lengths, caps
    costs       the time of steps, migrations and starts, from files or measurements
    world       virtual time, engines, links, moves; reports to the decision, and its plans carried out
    autoscaling the same engines behind other autoscalers
    outcome     recorded events, metrics, statistics, the level of service
    command     options, parallel runs, the JSON document, the table; the replay of recordings
    replay      the load generator: a trace, sent to a running service (`mell replay`)
    planning    the GPUs that a service level takes: contenders, the oracle, frontiers (`mell plan`)
    models      the same for several models on one set of devices (`mell plan --models`)
"""
