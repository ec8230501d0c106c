"""KV blocks inside vLLM's processes: the connector, the copiers of its workers, and the staging memory they share.

The connector follows vLLM's block tables step by step. In each of an engine's workers a copier, a thread, copies that
worker's shard of a request's blocks from the cache into a staging slot, and from a slot into the cache. Between two
steps, the elastic pool (`pool`, `executor`, `pages`) withholds blocks, and hands them out again. Replicas call the
copiers by `client`, through `deployments.engine`, and `migration.transport` carries slots between replicas; nothing
here imports either.
"""
