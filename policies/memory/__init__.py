"""The memory of devices that several models share: plans of replicas, the ledger, needs, the division, the ladder;
and pairs of replicas.

Pure, like all policies. It imports `policies.model`, and pairs the formulas of `policies.cost`; reports of replicas and
demands of pools come in, orders of memory go out. The simulator's devices execute all of them; the live scheduler forms
no pairs by itself.
"""
