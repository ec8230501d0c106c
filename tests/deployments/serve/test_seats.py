"""The store of claims, over a dictionary in the place of Ray's."""

import logging

import pytest

from deployments.serve.fences import next_fence
from deployments.serve.seats import SeatClaim, ServeClaimStore
from migration.protocol.errors import Refused
from policies.model import SOLE_POOL, Bytes, ReplicaId
from tests.ray_store import replace_store

A = ReplicaId("a")
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
    replace_store(monkeypatch)[b"claims/mell"] = stored
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert ServeClaimStore("mell", 1).read() == kept
    assert len(caplog.records) == dropped


def test_a_scheduler_that_has_been_replaced_does_not_write_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_store(monkeypatch)
    first = ServeClaimStore("mell", next_fence("mell"))
    next_fence("other")
    first.write({A: CLAIM})
    second = ServeClaimStore("mell", next_fence("mell"))
    with pytest.raises(Refused):
        first.write({})
    assert second.read() == {A: CLAIM}
    second.write({})
    assert first.read() == {}
