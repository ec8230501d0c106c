"""The service level and the number of replicas in the decision: limits of speed, predictions, and their reasons.

The decision takes its limits from here; the live scheduler shows operators the rest.
"""
