"""The contents of an engine's prefix cache, as its replica knows them: an exact mirror, kept up by the engine's events.

Engines import this room; it imports `migration.kv.cache_events` and `policies.prefix`. Events come from vLLM's
scheduler over ZMQ, or from a paced engine's own block pool. Changes go to the scheduler with the replica's reports, and
matches to the targets of migrations.
"""
