"""The differential corpus: requests that vLLM's own server and Mell have to answer alike, and how answers are compared.

Pure: a request (`cases`) is a value drawn from a seed, an answer (`answers`) is one JSON document whether it came whole
or as a stream, and `comparison` lists the differences of two documents. `tests/integration` sends the requests, moves
them and kills their replicas. Imports nothing of Ray, vLLM or HTTP.
"""
