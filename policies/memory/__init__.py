"""The memory of devices that several models share: plans of replicas, the ledger, the division, the ladder.

Pure, like all policies. It imports `policies.model` alone; reports of replicas and needs of pools come in, orders of
memory go out. The simulator's devices execute them; the live scheduler has the ledger alone.
"""
