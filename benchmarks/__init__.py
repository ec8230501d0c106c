"""Measurements. Each command prints its figures with their conditions, as ratios to a reference from the same run.

A module of this folder is a command (`python -m benchmarks.NAME --help`) or an instrument that several commands share:
`servers` starts Mell and stock vLLM, `load` offers streams and times them, `admin` gives orders, `moved` measures one
migration, and `beside` its effect on other streams. A measurement of several files is a room. No other package imports
this one; figures go to the terminal, to JSON files and, by hand, by `evaluation` or by `gpu`, to docs/.

    serving, versions, watched      the cost of serving: beside stock vLLM, beside another version, with live pages open
    pause, adaptive, scaledown      moves as a client sees them
    transfer                        the stages of a move of KV blocks
    gpu                             all that only a GPU can settle, part by part
    starting                        the start of a replica, from the order to the first token
    soak, chaos                     thousands of moves; faults at random times
    epoch, planner, floor           the processor time of decisions
    economics, evaluation           GPUs and latencies: of the closed loop, and of the simulated policies
"""
