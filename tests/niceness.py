"""The right to lower niceness, which a machine may not give to those who test on it."""

import subprocess
import sys

import pytest

_TRIED = "import os; os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, 0)"


def _may_lower() -> bool:
    """Try it on a process of its own."""
    return subprocess.run([sys.executable, "-c", _TRIED], stderr=subprocess.DEVNULL).returncode == 0


lowers_niceness = pytest.mark.skipif(not _may_lower(), reason="needs the right to lower niceness")
"""Marks a test that needs the right."""
