"""vLLM's own server application in the ingress, over Mell presented as one engine core on vLLM's wire.

`app` makes vLLM's application, `engine_client` is vLLM's client of engines, `core` the engine core that it connects to.
The ingress's deployment imports this room, and only with `ingress.frontend: vllm`, since it imports vLLM; it imports
the ingress's streams. Requests come from HTTP clients through vLLM's application; outputs come from replicas.
"""
