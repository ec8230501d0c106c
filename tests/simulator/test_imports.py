"""Whoever only simulates or replays installs no engine, no cluster and no web server."""

import subprocess
import sys

ABSENT = ("app", "cupy", "deployments", "fastapi", "ray", "starlette", "torch", "uvicorn", "vllm")

IMPORT_ALL = f"""
import importlib, pkgutil, sys, simulator
for module in pkgutil.walk_packages(simulator.__path__, "simulator."):
    importlib.import_module(module.name)
print(*sorted(sys.modules.keys() & {set(ABSENT)}))
"""


def test_it_imports_neither_engine_cluster_web_server_nor_the_product() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
