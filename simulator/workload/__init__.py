"""The requests of a run: arrivals from a trace or a Poisson process, lengths from a table or a trace.

The command and the world import this room; it imports the simulator's errors and the room of traces. Files and options
come in; jobs with arrival times and lengths go out.
"""
