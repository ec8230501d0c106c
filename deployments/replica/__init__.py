"""The `Engine` deployment: one engine, the requests on it, and the migrations that it leads or takes in.

The application imports this room; it imports `engine`, `api`, `serve`, `metrics` and `processes`. Submissions come from
ingresses, orders from the scheduler, blocks from other replicas; tokens go out through an outbox per ingress.
"""
