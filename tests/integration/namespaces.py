"""Processes apart from others of this machine, as in a container: they end together, and share no memory or files."""

import shutil
import subprocess

import pytest

APART = ("unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")
"""The command that gives what follows PID and mount namespaces of its own, which end with it."""


def _permitted() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*APART, "true"], stderr=subprocess.DEVNULL).returncode
    )


needs_namespaces = pytest.mark.skipif(not _permitted(), reason="no PID namespaces here (they need root)")
"""Marks a test of processes that are apart."""
