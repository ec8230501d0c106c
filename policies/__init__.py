"""Placement decisions: pure functions over values, free of Ray, vLLM, clocks and I/O.

Every other package may import this one; it imports the standard library only. Reports, arrivals and orders come from
the live scheduler or the simulator; plans go back, with a memory that only the decision changes.
"""
