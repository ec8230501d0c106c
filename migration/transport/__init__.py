"""Transports of staged blocks to another replica, chosen by configuration: memory of one node, gloo, or NCCL.

A transport implements `Transport` of the protocol's ports: the source's replica sends a staging slot of
`migration.run.slots`, the target's receives it into one of its own, or gets a reference to the source's. Slots are
opaque here, except for their header; the requests that own the blocks do not appear.
"""
