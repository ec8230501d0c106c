"""The cluster model of decisions: replicas, requests, their locations, and the free room.

`Cluster` is the only writer of its `Replica` and `Request` objects; policies read them and call its methods.
`policies.decision` brings it up to date with each observation and takes an epoch's outcome from it as a `Plan`.
"""
