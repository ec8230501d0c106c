"""The placement policies: six rules that decide where requests live, with their options and the registry of names.

A policy reads a `Cluster` and calls its methods; it keeps no state and uses neither time nor reports.
`policies.decision` calls it for every arrival and every epoch, and sets the cluster's limits on moves and openings.
"""
