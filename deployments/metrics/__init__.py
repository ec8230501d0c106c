"""Metrics: instruments in every process, and their collection by the process that is scraped.

Replicas, scheduler and ingress import this room, and it imports none of them. Counts come from the process itself;
families in Prometheus's text format go to the ingress that answers the scrape.
"""
