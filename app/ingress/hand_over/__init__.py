"""The hand-over of all requests to another Mell, whose cluster replaces this one; and requests taken over from one.

To the readers of an ingress, the other Mell is one more replica: requests are submitted to it with their tokens so far,
and tokens come back in frames, as from a replica. Routes and the deployment import this room; it imports the streams
and the client of Mell's API. `rules` decides, without input, output or time.
"""
