"""The state tables of source, target, reader and donor, as literal values, and their interpreter.

`table` has the theory of operation. The shells in `migration.run` feed the tables with events, and carry out their
actions.
"""
