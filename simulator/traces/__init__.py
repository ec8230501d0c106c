"""Traces of requests: the one reader of their files, for `mell plan`, the simulator and the replay.

It imports the simulator's errors only. A file comes in, in any of the known formats; arrival times from the first
request on, lengths, and an account of all that was dropped or changed go out. Parts in the order of the data:

    text      bytes to text: compression and encoding
    records   text to rows: CSV with any separator, lines of JSON, arrays, objects of columns
    formats   the known formats, by the names of their columns
    times     numbers and date-times to seconds, and the unit of a column of numbers
    rows      rows to arrays of numbers
    trace     the requests of a file in order of arrival, and the account of what was dropped or changed
    account   the account as text
"""
