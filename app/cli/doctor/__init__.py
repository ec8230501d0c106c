"""`mell doctor`: checks of an installation, each with a remedy.

`app.cli.__main__` imports this room; it imports the command line's endpoint and terminal and, only to validate a
configuration, `app.settings`. Probes of machine, packages and endpoint come in; findings go to the terminal.
"""
