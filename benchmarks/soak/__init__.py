"""Thousands of forced moves between healthy replicas: every token right, no leak, no growing process.

`forcing` opens streams and moves them until they end, round by round; `stock` gets stock vLLM's answers to compare
with, and `report` reads the file of rounds and formats it. `cached` compares answers from prefix caches with computed
ones, and `handovers` those of requests that are handed over from prefill to decoding; `noise` damages blocks, which the
latter has to notice. The room imports the port of a server, the offers, the verdicts and the watch of
`benchmarks.chaos`; `python -m benchmarks.soak --help` lists the options.
"""
