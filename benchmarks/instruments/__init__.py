"""Instruments that several measurements share.

`models` makes models, `admin` gives orders, `moved` measures one migration and `beside` its effect on other streams;
`runs` carries out simulated runs and keeps files of measured ones. `control` is a process: vLLM's own server over an
engine core that it has not started. Commands of `benchmarks` import this room, which imports `benchmarks.servers` and
`benchmarks.load`; figures go back to the commands.
"""
