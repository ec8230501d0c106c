"""The uses of a replica's prefix cache: copies to other replicas, fetches from them, returns, and an audit.

`deployments.replica.deployment` puts the parts together; they import the replica's requests and migrations. Blocks come
and go by the copying half of a migration; orders come from the scheduler, with placements, or follow from a request's
end.
"""
