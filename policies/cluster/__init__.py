"""The cluster model of decisions: replicas, requests, their locations, and the free room.

    Cluster     replicas and requests, and the only writer of their fields (`cluster`, `replica`)
    Decisions   the decisions of an epoch: a transaction, written by policies, that ends in a `Plan` (`decisions`)
    Supply      the slots of new replicas, written by `Decisions` and `policies.decision`
    Rooms       an index of the running replicas by room, written by `Cluster`

The functions of `search`, `sizes` and `capacity` read a cluster; only `close_idle` decides. `policies.decision`
brings a cluster up to date with each observation and takes an epoch's outcome from its decisions.
"""
