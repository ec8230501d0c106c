"""KV blocks inside vLLM's processes: the connector, the worker extension, and the staging memory they share."""
