"""The requests of an ingress on their replicas: their placement, and the streams of all replicas.

The deployment and vLLM's frontend import this room; it imports the protocol's reader and the ports of deployments.
Tokens come from replicas and go to the listener of a request.
"""
