"""vLLM's Rust frontend, `vllm-rs`: a child process of the ingress, on the same wire as vLLM's Python frontend.

    client -> Mell's layers -> RustFrontend -> HttpExchange (Unix socket) -> vllm-rs -> RustCore -> replicas

`frontend` is the ASGI application and keeps the process running, `process` is one life of it, `exchange` an HTTP call
to it, `core` the engine core that it connects to. The ingress's `frontends` imports this room; it imports vLLM and the
room above.
"""
