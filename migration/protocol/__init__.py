"""The protocol of one request's life on several replicas: three tables, their messages, and the reader's pure half.

Everything here is a calculation: no text, no HTTP, no asyncio, no clock; any part of Mell may import it. Events and
messages come from the shells in `migration.run`, commands and actions go back to them.
"""
