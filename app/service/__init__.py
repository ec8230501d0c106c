"""The composition of an ingress process: the `Ingress` deployment, and the API that its HTTP server offers.

Only `app.main` imports it, and it imports the rooms of `app.ingress` and `app.frontend`: `deployment` makes them from
the settings and connects them to replicas and the scheduler; `api` puts Mell's layers around vLLM's application.
"""
