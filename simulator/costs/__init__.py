"""Costs of computing, moving and starting in time, memory and bandwidth, from files, profiles or measurements.

The world and the command import this room; it imports the simulator's errors only. Cost files and measured profiles
come in; step times and the costs of migrations go out.
"""
