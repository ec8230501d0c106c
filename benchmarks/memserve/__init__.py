"""The evaluation of the MemServe paper (arXiv 2406.17565, section 8) repeated in the simulator, claim by claim.

`case` has the paper's settings and workloads as values, `simulate` performs them, `claims` compares with the paper.
`python -m benchmarks.memserve` renews the paper's part of docs/evaluation.md, by the page's own code.
"""
