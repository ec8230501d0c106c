"""Moves of KV blocks between replicas without an engine: the stages alone, and the pipeline of the serving code.

`end` and `ports` are a replica on a CPU, a Ray actor with a cache and a transport; `gpu_ends` are the processes of a
move between GPUs, which `benchmarks.gpu.stages` measures. Blocks come from a cache filled at random, and spans of time
go to the driver, `python -m benchmarks.transfer`; the room imports `migration` and the deployments' transports.
"""
