"""Generators of the pages that repeat what the code or a data file declares, each compared with its page by a test.

Settings become docs/configuration.md, the table of vLLM's flags docs/vllm-flags.md, the OpenAPI document docs/api.md,
the list of panels below the Grafana dashboard, the measured results (docs/results.toml) docs/results.md, and the
records of runs on GPUs (docs/gpu/*.jsonl) a part of docs/gpu.md. `python -m docs.make` writes them all; only its tests
import this package.
"""
