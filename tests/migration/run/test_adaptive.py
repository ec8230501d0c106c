"""Estimates beside real migrations, over links that are held to a speed, between engines that take time to prefill."""

import time
from pathlib import Path

import pytest

from deployments.config import MigrationSettings
from deployments.scheduler.dispatch import report_of
from migration.protocol.messages import ONLY, PathRequest
from migration.protocol.record import MigrationRecord, Outcome
from migration.run.source import Order
from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.model import ReplicaId, RequestId, Tokens
from policies.paths.choice import Choice
from policies.paths.estimates import Boundaries, Estimates
from policies.paths.prices import Prices, Profile
from policies.plan import Move, Reason
from tests.deployments.engine.quick_engine import set_pace
from tests.integration import faults
from tests.integration.faults import Fault
from tests.migration.world import Pair, make_pair, spec
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time
A, B = ReplicaId("a"), ReplicaId("b")
PROMPT = 200
HOPEFUL = Line.of(1e9, 0.01)
"""A link of which the best is expected."""


@pytest.fixture
def switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the fault of the transport: none."""
    path = tmp_path / "faults.json"
    faults.write(path, "shared")
    monkeypatch.setenv(faults.VARIABLE, str(path))
    return path


def make(token_s: float = 0.0) -> Pair:
    """Two replicas over the transport whose speed can be switched; b prefills, a does at once."""
    pair = make_pair(transport=faults.make(MigrationSettings()))
    if token_s:
        set_pace(pair.b.engine, prefill_tokens_per_s=1 / token_s)
    return pair


def make_estimates(pair: Pair) -> Estimates:
    """Estimates that hope for the best of links, and have the formula of the steps of b."""
    estimates = Estimates(Boundaries(), 1.0, Prices(HOPEFUL))
    estimates.follow(ReplicaSpeed(pair.b.engine._costs))
    for replica in (pair.a, pair.b):
        marks = replica.engine.fingerprint
        estimates.profile(replica.id, Profile("node", marks.cache, marks.block_bytes / marks.block_size))
    return estimates


async def migrate(pair: Pair, name: str, path: PathRequest, choice: Choice | None = None) -> MigrationRecord:
    """Move a request that has just begun; its record."""
    request = spec(name, prompt=PROMPT, tokens=600)
    await pair.until(pair.submit(request), 3)
    predicted = (choice.kv_s, choice.tokens_s) if choice else (None, None)
    pair.a.moves.start(Order(f"m-{name}", request.id, path, Reason.DRAIN, *predicted), B)
    record = await pair.settled()
    pair.b.moves.release(request.id, None)
    return record


async def chosen(pair: Pair, estimates: Estimates, name: str) -> Choice:
    """The path of one more move, which is then made and learned from."""
    move = Move(RequestId(name), A, B, Tokens(PROMPT), Reason.DRAIN, 0)
    choice = estimates.decide(move, (), time.time())
    record = await migrate(pair, name, ONLY[choice.path or choice.faster], choice)
    assert record.outcome is Outcome.COMMITTED and record.predicted_kv_s == choice.kv_s
    estimates.learn(report_of(record), time.time())
    return choice


@pytest.mark.parametrize(
    ("bytes_per_s", "token_s", "best"),
    [(800.0, 0.0, "tokens"), (None, 0.01, "kv")],
    ids=["a slow link", "a slow prefill"],
)
async def test_the_choice_comes_to_the_path_that_is_faster(
    switches: Path, bytes_per_s: float | None, token_s: float, best: str
) -> None:
    pair = make(token_s)
    estimates = make_estimates(pair)
    faults.write(switches, "shared", Fault.SLOW if bytes_per_s else None, bytes_per_s)
    choices = [await chosen(pair, estimates, f"r{n}") for n in range(4)]
    assert [choice.path for choice in choices[2:]] == [best] * 2


async def test_a_slow_link_is_avoided(switches: Path) -> None:
    pair = make(0.0015)
    estimates = make_estimates(pair)
    before = [await chosen(pair, estimates, f"before{n}") for n in range(3)]
    faults.write(switches, "shared", Fault.SLOW, 600.0)
    after = [await chosen(pair, estimates, f"after{n}") for n in range(5)]
    assert before[-1].path == "kv" and after[-1].path == "tokens"


# --- the throttle itself ---------------------------------------------------------------------------------


async def test_copying_takes_the_time_of_the_link(switches: Path) -> None:
    faults.write(switches, "shared", Fault.SLOW, 10_000.0)
    record = await migrate(make(), "r", PathRequest.KV)
    assert record.outcome is Outcome.COMMITTED and record.path == "kv"
    assert record.copy_s >= record.bytes / 10_000.0 > 0.08


async def test_transfers_of_several_requests_share_the_link(switches: Path) -> None:
    faults.write(switches, "shared", Fault.SLOW, 20_000.0)
    pair = make()
    for name in ("one", "two", "three"):
        await pair.until(pair.submit(spec(name, prompt=PROMPT, tokens=600)), 3)
    began = now()
    for name in ("one", "two", "three"):
        pair.a.moves.start(Order(f"m-{name}", RequestId(name), PathRequest.KV, Reason.DRAIN), B)
    await pair.settled()
    records = pair.a.moves.records()
    assert [record.path for record in records] == ["kv"] * 3
    assert now() - began >= sum(record.bytes for record in records) / 20_000.0


@pytest.mark.parametrize(("fault", "bytes_per_s"), [(Fault.SLOW, None), (None, 1.0), (Fault.FAIL, 1.0)])
def test_a_speed_goes_with_slowness(tmp_path: Path, fault: Fault | None, bytes_per_s: float | None) -> None:
    with pytest.raises(ValueError, match="SLOW"):
        faults.write(tmp_path / "faults.json", "shared", fault, bytes_per_s)
