"""Instruments that several measurements share.

`models` makes models, `load` offers streams and times them, `admin` gives orders, `moved` measures one migration and
`beside` its effect on other streams; `runs` carries out simulated runs and keeps files of measured ones. `control` is a
process: vLLM's own server over an engine core that it has not started. Commands of `benchmarks` import this room, and
figures go back to them; servers are started by `benchmarks.servers`.
"""
