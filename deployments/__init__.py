"""Ray Serve deployments: ingress-facing routing, engine replicas and the scheduler."""
