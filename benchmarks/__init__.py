"""Measurements. Each command prints its figures with their conditions, as ratios to a reference from the same run.

A module of this folder is a command (`python -m benchmarks.NAME --help`), but for two: `servers` starts Mell and stock
vLLM, and `load` offers streams and times them. They stand here because `versions` imports those of another version; the
other shared `instruments` are a room. A measurement of several files is a room, too. No other package imports this one;
figures go to the terminal, to JSON files, by hand to docs/results.toml, and by `evaluation`, `memserve`, `kunserve` or
`gpu` to docs/.

    serving, versions, watched      the cost of serving: beside stock vLLM, beside another version, with live pages open
    pause, adaptive, scaledown      moves as a client sees them
    transfer                        the stages of a move of KV blocks
    gpu                             all that only a GPU can settle, part by part
    starting                        the start of a replica, from the order to the first token
    soak, chaos                     thousands of moves; faults at random times
    epoch, planner, floor           the processor time of decisions
    routing, caching                first tokens where prompts are cached: by router, tier and copy
    memserve                        the MemServe paper's claims, hand-overs and packing by what is shared
    kunserve                        the KunServe paper's claims, simulated
    dashboard                       the picture of the Grafana dashboard, with the data of a Prometheus
    economics, evaluation           GPUs and latencies: of the closed loop, and of the simulated policies
"""
