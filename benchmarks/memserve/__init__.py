"""The evaluation of the MemServe paper (arXiv 2406.17565, section 8) repeated in the simulator, claim by claim.

`case` has the paper's settings and workloads as values, `results` the figures of their runs, `claims` compares with the
paper, and `live` repeats runs on paced engines. `python -m benchmarks.memserve` renews the paper's part of
docs/evaluation.md, by the page's own code. Three measurements are commands of their own: `handover` times the tokens
around a hand-over, `disaggregated` compares mode `auto` with the others, `packing` counts replicas by how sizes are
counted.
"""
