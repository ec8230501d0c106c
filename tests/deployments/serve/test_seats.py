"""The store of claims, over a dictionary in the place of Ray's."""

import logging

import pytest

from deployments.serve.fences import next_fence
from deployments.serve.seats import SeatClaim, ServeClaimStore
from migration import ray_store
from migration.protocol.errors import Refused
from policies.model import SOLE_POOL, Bytes, ReplicaId
from tests.ray_store import replace_store

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
CLAIM = SeatClaim(SOLE_POOL, "n", Bytes(5))


@pytest.mark.parametrize(
    ("stored", "kept", "dropped"),
    [
        (b'{"a": {"pool": "Engine", "node": "n", "size": 5}}', {A: CLAIM}, 0),
        (b'{"a": {"pool": "Engine", "node": "n", "size": 5}, "b": {"size": "much"}}', {A: CLAIM}, 1),
        (b'{"a": {"pool": "Eng', {}, 1),
        (b"[]", {}, 1),
    ],
    ids=["readable", "one of two", "cut off", "a list"],
)
def test_a_claim_that_cannot_be_read_is_dropped_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stored: bytes,
    kept: dict[ReplicaId, SeatClaim],
    dropped: int,
) -> None:
    replace_store(monkeypatch)[b"claims/mell/1"] = stored
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert ServeClaimStore("mell", 2).take_over() == kept
    assert len(caplog.records) == dropped


def test_a_scheduler_that_has_been_replaced_gives_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_store(monkeypatch)
    first = ServeClaimStore("mell", next_fence("mell"))
    for other in ("other", "mell/other"):
        ServeClaimStore(other, next_fence(other)).take_over()
    first.take_over()
    first.write({A: CLAIM})
    next_fence("mell")
    with pytest.raises(Refused):
        first.write({A: CLAIM, B: CLAIM})


@pytest.mark.parametrize("late", [{}, {C: CLAIM}], ids=["ends a claim", "has another one"])
def test_a_late_write_changes_no_claim_of_a_newer_scheduler(
    monkeypatch: pytest.MonkeyPatch, late: dict[ReplicaId, SeatClaim]
) -> None:
    """The newer one begins, and gives a claim, while the write of the older one is on its way."""
    replace_store(monkeypatch)
    put = ray_store.write
    first = ServeClaimStore("mell", next_fence("mell"))
    first.take_over()
    first.write({A: CLAIM})

    def put_late(key: str, value: bytes, replace: bool = True) -> bool:
        monkeypatch.setattr(ray_store, "write", put)
        second = ServeClaimStore("mell", next_fence("mell"))
        assert second.take_over() == {A: CLAIM}
        second.write({A: CLAIM, B: CLAIM})
        return put(key, value, replace)

    monkeypatch.setattr(ray_store, "write", put_late)
    with pytest.raises(Refused):
        first.write(late)
    assert ServeClaimStore("mell", next_fence("mell")).take_over() == {A: CLAIM, B: CLAIM}


def test_a_key_that_is_removed_while_it_is_read_has_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = replace_store(monkeypatch)
    kept[b"claims/mell/1"] = b'{"a": {"pool": "Engine", "node": "n", "size": 5}}'
    read = ray_store.read

    def read_late(key: str) -> bytes | None:
        monkeypatch.setattr(ray_store, "read", read)
        ServeClaimStore("mell", 2).take_over()
        return read(key)

    monkeypatch.setattr(ray_store, "read", read_late)
    assert ServeClaimStore("mell", 3).take_over() == {A: CLAIM}
    assert sorted(kept) == [b"claims/mell/3"]
