"""Paths of migrations: which moves send KV, which send tokens, and which wait (the paper's section V).

Replicas' profiles and the reports of ended moves come in, from `policies.decision`; predictions and choices go out.
Everything is a calculation on seconds, bytes and tokens; `policies.decision` alone imports it and keeps its state.
"""
