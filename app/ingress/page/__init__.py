"""The live page at `/mell/`: its routes, its stream of events, and the state and chart points in them.

The HTTP routes import this room; it imports the ASGI plumbing, telemetry and `policies.bounds`. The scheduler's
snapshot and the ingress's latency histograms come in; the files of `app/page` and server-sent events go to browsers.
"""
