"""Measurements of cached prompts: where they come from, and what is left of them after a scale-down.

`tiers` times first tokens out of an engine's own memory and out of its tier of host memory, `prefix_copies` those
behind a copy from another replica, and `warm_scaledown` follows hit rates past the end of a replica. Each is a command
(`python -m benchmarks.caching.tiers --help`) on a server of its own, and prints its figures.
"""
