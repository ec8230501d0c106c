"""Mell's applications: the Serve app, the trace replay, and what they are configured with."""
