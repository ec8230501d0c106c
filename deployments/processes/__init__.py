"""Processes of one machine, none of which outlives its owner.

A `guard` beside each replica ends the replica's child processes, above all those of its engine, when the replica ends.
A `keeper` above the command that starts Mell ends everything below it. Both are separate processes that import nothing
but the standard library, so they work in any state of their owner. They read /proc and send SIGKILL, which no process
can ignore. Each deployment starts its guard, and `app.serve` the keeper. A replica's `forkserver` starts the processes
of its engine as forks, and ends with it.
"""
