"""The tier of host memory behind an engine's prefix cache: Mell's connector together with vLLM's own offloading.

vLLM imports `tiered` by its name; the copies in numbered slots serve engines without a GPU.
"""
