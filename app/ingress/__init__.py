"""The ingress: the API of vLLM's server over HTTP, text in and text out; replicas see only tokens.

`app.service` composes its rooms. Requests come from clients, and their tokens from replicas by streams that survive
moves and deaths of replicas; placements and the cluster's state come from the scheduler.
"""
