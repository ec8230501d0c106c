"""The `Scheduler` deployment: gathers reports, has `policies.decision` decide, and carries out its plans.

The application imports this room; it imports `api`, `serve`, `metrics` and `processes`. Reports come from replicas and
placements from ingresses; orders go to replicas, and the wanted number of replicas to Serve's controller.
"""
