"""The programs in examples/ do what they say."""

import asyncio
import os
import sys
from collections.abc import Mapping

import pytest

from tests.counts import LONG_ONLY
from tests.integration.application import Application
from tests.integration.conftest import ROOT

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "agents.py": ("--agents", "2", "--turns", "2", "--tokens", "12"),
    "burst.py": ("--streams", "6", "--tokens", "60"),
    "by_hand.py": ("--tokens", "500"),
    "chat.py": ("Where do blocks move?", "--tokens", "24"),
}


def test_no_example_is_missing_here() -> None:
    elsewhere = ["spot.py"]  # in test_6_nodes
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted([*ARGUMENTS, *elsewhere])


@pytest.mark.parametrize(
    "example", [pytest.param(each, marks=() if each == "by_hand.py" else LONG_ONLY) for each in ARGUMENTS]
)
async def test_an_example(application: Application, example: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples" / example), "--url", application.url, *ARGUMENTS[example]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    output, errors = (each.decode() for each in await process.communicate())
    assert process.returncode == 0, errors
    expected = {
        "agents.py": "agent-2, turn 2: ",
        "burst.py": "6 of 6 streams whole",
        "by_hand.py": "the stream is whole",
        "chat.py": " tokens]",
    }
    assert expected[example] in output, output
    if example == "by_hand.py":
        assert "by kv: committed" in output and "by tokens: committed" in output, output
