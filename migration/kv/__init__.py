"""KV blocks inside vLLM's processes: the connector, the worker extension, and the staging memory they share.

The connector follows vLLM's block tables step by step; the worker extension copies a request's blocks from the cache
into a staging slot, and a connector with a staged load copies them from a slot into the cache. Replicas drive both
through `deployments.engine`, and `migration.transport` carries slots between replicas; nothing here imports either.
"""
