"""The autoscaler beside the application, over states and writers that take no time."""

import asyncio
from dataclasses import replace

import pytest

from app.client.documents import ReplicaDocument, RequestDocument, StateDocument
from benchmarks.economics.external import follow, kv_in_use
from policies.model import Phase, ReplicaState

STATE = StateDocument(0.0, "off", None, None, None, (), ())


def request(tokens: int, phase: Phase) -> RequestDocument:
    return RequestDocument(f"r{tokens}", "", tokens, phase, 0, movable=True)


def replica(used: int, *requests: RequestDocument, capacity: int = 1000) -> ReplicaDocument:
    return ReplicaDocument("a", ReplicaState.RUNNING, "n", used, capacity, 0, requests)


def test_the_load_has_the_cache_in_use_and_the_queued_prompts() -> None:
    full = replica(800, request(800, Phase.DECODE), request(300, Phase.WAITING))
    starting = replica(0, capacity=0)
    assert kv_in_use(replace(STATE, replicas=(full, replica(200), starting))) == pytest.approx(1.3)


class FakeProbe:
    """Gives these states one after the other, then stops its reader."""

    def __init__(self, states: list[StateDocument | None]) -> None:
        self._states = states

    async def state(self) -> StateDocument | None:
        """The next state."""
        if not self._states:
            raise asyncio.CancelledError
        return self._states.pop(0)


async def test_the_number_follows_the_load_and_a_failed_poll_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.economics.external.TICK_S", 0.001)
    states = [replace(STATE, replicas=(replica(900),)), None, replace(STATE, replicas=(replica(900), replica(300)))]
    seen: list[tuple[float, int]] = []

    def observe(now: float, load: float, running: int) -> int:
        seen.append((load, running))
        return 10 * len(seen)

    written: list[int] = []
    with pytest.raises(asyncio.CancelledError):
        await follow(observe, FakeProbe(states), written.append)  # type: ignore[arg-type]
    assert [running for _, running in seen] == [1, 2]
    assert [load for load, _ in seen] == pytest.approx([0.9, 1.2])
    assert written == [10, 20]
