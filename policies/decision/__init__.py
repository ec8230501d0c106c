"""What is done about a cluster, and when: placing, epochs, limits, evacuation, admission, cool-downs and the breaker.

All of it is pure: observations and points in time come in, plans go out, and nothing else is read or written.
The live scheduler, the dry run, the simulator and the replay of recordings call it with observations of their own.
"""
