"""The simulated world: engines, links and moves in virtual time, which report to the decision and carry its plans out.

The command imports this room; it imports costs, jobs and `policies.decision`. Jobs come in, events go to an observer.
"""
