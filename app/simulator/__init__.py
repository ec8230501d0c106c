"""Plays a workload through a policy in virtual time. No Ray, no vLLM: the decisions are the live scheduler's own."""
