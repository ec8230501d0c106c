"""The copier of an engine's worker, a thread, and the replica's connection to it.

The worker starts it; replicas call it by `client`, through `deployments.engine`. It copies the blocks that `tables`
allows between the cache and staging slots, while steps run.
"""
