"""Costs: the time, memory and bandwidth that computing, moving and starting take, from files, profiles or measurements.

The world and the command import this room; it imports the simulator's errors only. Cost files and measured profiles
come in, times of steps and costs of migrations go out.
"""
