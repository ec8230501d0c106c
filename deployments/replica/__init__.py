"""The `Engine` deployment: one engine, its requests, and the migrations that leave or reach it.

The application imports this room; it imports `engine`, `api`, `serve`, `metrics` and `processes`. Submissions come from
ingresses, orders from the scheduler, blocks from other replicas; tokens go out through an outbox per ingress.
"""
