"""Transports of staged blocks to another replica, chosen by configuration: memory of one node, gloo, or NCCL.

A transport implements `migration.ports.Transport`: the source's replica sends a staging slot of `migration.slots`, the
target's receives it into one of its own, or gets a reference to the source's. Nothing here knows the content of slots
beyond their header, or the requests that the blocks belong to.
"""
