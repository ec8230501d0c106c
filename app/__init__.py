"""Mell's programs: the Serve application, the command line, and their settings.

No other package imports this one; it imports all others but `simulator`, whose commands it runs as programs. Settings
and HTTP requests come from users; composition roots build the application from `deployments`, `migration` and
`policies`.
"""
