"""The HTTP side of the ingress: Mell's own routes, the OpenAPI document, the server, and limits on connections.

The `Ingress` deployment imports this room; it imports access, page and telemetry. Bytes come from clients, and answers
go back as JSON or as server-sent events.
"""
