"""Prompts by the names of their KV blocks: the replicas that have a prefix, and the time to a first token on each.

The decision imports this room; it imports `policies.cost` and `policies.model`. Changes of caches come from the
replicas' reports, names of prompts with arrivals; matches and times go to the placement.
"""
