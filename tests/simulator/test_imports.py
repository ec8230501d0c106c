"""Whoever only simulates or replays installs no engine, no cluster and no web server.

The load generator has the client of Mell's API from `app`, and nothing else.
"""

import subprocess
import sys

import pytest

ABSENT = ("cupy", "deployments", "fastapi", "ray", "starlette", "torch", "uvicorn", "vllm")

IMPORT_ALL = f"""
import importlib, pkgutil, sys, simulator
for module in pkgutil.walk_packages(simulator.__path__, "simulator."):
    importlib.import_module(module.name)
served = [name for name in sys.modules if name.startswith("app.") and not name.startswith("app.client")]
print(*sorted(sys.modules.keys() & {set(ABSENT)}), *served)
"""


@pytest.mark.slow
def test_it_imports_neither_engine_cluster_web_server_nor_the_product() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
