"""Several models on one set of GPUs, in the simulator: two made-up workloads, and the GPUs that each contender takes.

workloads   a Zipf long tail of 40 models, and Aegaeon's 100 models that are rarely asked
__main__    the frontiers and the tables of docs/simulation.md
"""
