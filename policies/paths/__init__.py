"""Paths of migrations: the choice between sending KV, sending tokens and waiting (the paper's section V).

Replicas' profiles, step times, and the reports of ended moves and copies come in, from `policies.decision`;
predictions and choices go out. Everything is a calculation on seconds, bytes and tokens; `policies.decision` alone
imports this and keeps its state.
"""
