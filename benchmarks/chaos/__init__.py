"""Faults at random times under a replayed trace: every stream ends as promised, and nothing is left behind.

`strikes` draws what goes wrong, `offers` what is asked for, `hand` does the former and `run` both at once; `heard`
judges every answer, `watch` looks for what is left, `report` tells. `forcing` moves requests about without any faults.
"""
