"""Metrics on their way from the processes that count to the one that is scraped.

Replicas, scheduler and ingress import this room, and it imports none of them. Counts come from the process itself,
families in Prometheus's text format go to whoever scrapes.
"""
