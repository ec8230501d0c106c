"""Mell's programs: the Serve application, the simulator, the replay, the command line, and their settings.

No other package imports this one; it imports all of them. Settings and HTTP requests come from users; composition roots
build the application from `deployments`, `migration` and `policies`.
"""
