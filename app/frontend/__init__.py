"""vLLM's own server application in the ingress, over Mell presented as one engine core on vLLM's wire.

`app` makes vLLM's application, `engine_client` is vLLM's client of engines, `core` the engine core that it connects to.
`app.service` imports this room; it imports vLLM and the ingress's streams. Requests come from HTTP clients
through vLLM's application; outputs come from replicas.
"""
