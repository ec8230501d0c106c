"""Prefill and decoding on different replicas: who has which role, how many prefill, and whose requests move on.

The decision calls this room in every epoch and for every arrival; the room imports the decision's memory.
"""
