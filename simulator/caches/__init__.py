"""Prefix caches in the simulated world: the blocks of each replica, and the hit rates that no placement can exceed.

The world and the command import this room; it imports jobs and `policies.prefix`. The names of prompts' blocks come
from traces; changes of caches go to the decision, as live replicas report them.
"""
