"""A pair: two workers of one model that each hold some layers, and run them for the steps of the other one's requests.

Each worker runs its layers for the buddy's requests, its guests (`guests`), and has remote layers of its own, which
the buddy runs (`half`). `link` and `wire` connect the two. `worker` is vLLM's worker with both; replicas call it
through their engine core, between two steps. Everything here is for vLLM's CPU build, with one worker per engine.
"""
