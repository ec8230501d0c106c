"""An engine without a model, free of time: the scheduler of its batch, and its account of KV blocks.

The paced engine (`deployments.engine`) runs it in real time, with tokens in its blocks, and the simulator's engine
(`simulator.world`) in virtual time, with names only. Both use the formula of step times (`policies.cost.steps`).
"""
