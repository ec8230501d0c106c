"""Other autoscalers, as alternatives to Mell's decision: a rule for the number of replicas, and a router before them.

The plans import this room; it imports the world's engines, the costs and the jobs. Requests come in; the world's events
and the number of GPUs go to an observer.
"""
