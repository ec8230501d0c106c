"""The HTTP side of the ingress: routes, the server, and limits on connections.

The `Ingress` deployment imports this room; it imports every other room of the ingress. Bytes come from clients, and
answers go back as JSON or as server-sent events.
"""
