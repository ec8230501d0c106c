"""The engine port and its two engines: vLLM, and a paced engine that keeps the timing of a GPU without one.

A replica drives an engine through `port.Engine`: it submits requests, receives tokens step by step, and stages or
loads KV blocks for migrations. Only `vllm_engine` imports vLLM; nothing here imports Ray or knows of other replicas.
"""
