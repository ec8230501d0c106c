"""The asyncio half of the protocol: one shell per party, which turns results and time-outs into events.

The deployments and the ingress import this room; it imports the protocol and reaches the rest by its ports.
Orders and replies of replicas come in, calls to replicas and the output of requests go out.
"""
