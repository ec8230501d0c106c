"""Costs: the time of engine steps and prefills, durations as lines over sizes, and their fits to measurements.

The simulator, the paced engine, the ingress, the paths of migrations and the decision import this room; it imports
nothing of the project. Measurements come in from replicas' reports, ended moves and clients' latencies; times in
seconds and their errors go out.
"""
