"""The replica's side of its memory plan: how its KV pool shrinks and grows under running requests.

`tables` has the states as a literal table, `run` the shell that executes its commands on an engine. Orders come from
the scheduler; reports go back to it (`policies.memory.ledger`). Nothing here imports an engine.
"""
