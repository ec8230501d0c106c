"""Telemetry of the ingress: metrics and log lines of requests, OpenTelemetry traces, and the scrape of the application.

The routes, the streams and the `Ingress` deployment import this room; it imports the ingress's errors and
conversations. Events of requests come from the routes and the streams, and metrics of all processes from their
deployments; log lines, spans and Prometheus's text go out.
"""
