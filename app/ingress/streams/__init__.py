"""The requests of an ingress on their replicas: their placement, the streams of all replicas, and the output so far.

The deployment and the routes import this room, the OpenAI side its `conversation`; it imports the protocol's reader
and the ports of deployments. Tokens come from replicas and go to the reader of a conversation.
"""
