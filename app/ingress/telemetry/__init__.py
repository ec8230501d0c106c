"""Telemetry of the ingress: metrics and log lines of requests, OpenTelemetry traces, and the scrape of all processes.

All other rooms of the ingress import this room; it imports the ingress's errors. Events of requests come from
admission, vLLM's frontend and the streams, and metrics of all processes from their deployments; log lines, spans and
Prometheus's text go out.
"""
