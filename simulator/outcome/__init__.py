"""The outcome of a run: recorded events, metrics, and the demand without any policy.

The command imports this room; it imports the world's observer and the jobs. Events come from the world; metrics by name
go to the JSON document.
"""
