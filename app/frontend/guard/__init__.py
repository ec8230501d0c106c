"""ASGI layers that make vLLM's application safe to expose: what reaches it is admitted, bounded, and free of addresses.

`layers` composes them; `routes` lists the open routes, `dialects` has their errors and keys; `bodies` and the modules
beside it check parsed requests. `app.service` imports this room; it imports the ingress's access and telemetry.
Requests come from the HTTP server and go to vLLM's application; its answers pass through, its errors in their dialect.
"""
