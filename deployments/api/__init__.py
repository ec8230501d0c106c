"""The deployments' remote methods as protocols, the stubs that call them, and the values that travel.

Ingress, replica and scheduler import this room; it imports `deployments.serve` to reach other processes, and the values
of `migration` and `policies`. Arguments come from a caller's process, results and errors from the process it calls.
"""
