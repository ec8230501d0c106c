"""The memory of the nodes, which the replicas of all pools share: ledgers, starts, orders, divisions, and their view.

The scheduler's deployment, its pools and its epochs import this room. Reports of replicas come in from the pools, calls
from replicas that start, divisions from `policies.decision`; orders go to replicas, claims to Ray's key-value store.
"""
