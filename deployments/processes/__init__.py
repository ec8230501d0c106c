"""Processes of one machine, none of which outlives its owner.

A `guard` beside each replica ends what the replica has started, an engine's processes above all, when the replica ends.
A `keeper` above the command that starts Mell ends everything below it. Both are processes of their own that import
nothing but the standard library, so they work whatever state their owner is in; they read /proc and send SIGKILL, which
needs nobody's consent. Each deployment starts its guard, and `app.serve` the keeper.
"""
