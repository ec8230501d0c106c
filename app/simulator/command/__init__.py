"""The command line of the simulator: options, checks, runs in several processes, the JSON document and the table.

`python -m app.simulator` imports this room; it imports all others. Arguments come in, a document and text go out.
"""
