"""Channels: TCP connections of their own between processes, for calls and events that are frequent or urgent.

An ingress has one to every replica, a replica one to each peer that its requests move to, the scheduler one to every
replica, and both ingresses and replicas one to the scheduler. `api`, `replica` and `scheduler` import this room, which
imports `migration` and `policies` alone. Calls go from the end that connects to the end that listens, answers and an
ingress's events the other way.
"""
