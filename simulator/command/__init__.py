"""The command line of the simulator: options, their checks, parallel runs, the JSON document and the table.

`python -m simulator` imports this room; it imports all others. Arguments come in; a document and text go out.
"""
