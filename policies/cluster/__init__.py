"""The cluster that decisions are made on: replicas, requests, who is where, and where there is room.

`Cluster` is the only writer of its `Replica` and `Request` objects; policies read them and call its methods.
`policies.decision` brings it up to date with each observation and takes an epoch's outcome from it as a `Plan`.
"""
