"""The simulated world: engines, links and moves in virtual time. It reports to the decision and executes its plans.

The command imports this room; it imports costs, jobs and `policies.decision`. Jobs come in; events go to an observer.
"""
