"""The decisions about a cluster: placement, epochs, limits, evacuation, admission, cool-downs and the breaker.

The room is pure: its input are observations and times, its output plans. It imports the other rooms of `policies`.
The live scheduler, the simulator and the replay of recordings call it with their own observations.
"""
