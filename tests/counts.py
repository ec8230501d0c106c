"""The number of random cases: a tenth of the full count in `make test`, all of them in `make test-long`."""

import os

import pytest

LONG = os.environ.get("MELL_TEST_LONG", "") == "1"
"""True if the full counts are requested."""

LONG_ONLY = pytest.mark.skipif(not LONG, reason="MELL_TEST_LONG adds it")
"""Marks what only a long run has."""


def scaled(full: int) -> int:
    """`full` in a long run, else a tenth of it, and at least 1."""
    return full if LONG else max(1, full // 10)
