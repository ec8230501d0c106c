"""Fault injection at random times under a replayed trace: every stream ends as promised, and no resource leaks.

`faults` draws the faults and `offers` the requests; `run` sends these while `injector` carries out those; `answers`
judges every answer, `watch` looks for leaks, and `report` formats the result. `benchmarks.soak` imports its server,
offers and verdicts; `python -m benchmarks.chaos --help` lists the options.
"""
