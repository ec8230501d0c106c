"""The deployments' remote methods as protocols, their stubs, the values that travel, and the channel for tokens.

Ingress, replica and scheduler import this room; it imports `deployments.serve` to reach other processes, and the values
of `migration` and `policies`. Arguments come from a caller's process, results and errors from the process it calls.
"""
