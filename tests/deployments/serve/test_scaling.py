"""The code in Serve's controller: the autoscaling policy, and stopping exactly one replica."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.serve import scaling
from deployments.serve.scaling import (
    STALE_S,
    CountRequests,
    MirrorWanted,
    Wanted,
    read_wanted,
    stop_exactly,
    write_wanted,
)
from policies.model import SOLE_POOL
from tests.ray_store import replace_store


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """The key-value store, and a controller of start "g"."""
    monkeypatch.setattr(scaling, "_generation", lambda: "g")
    return replace_store(monkeypatch)


@dataclass
class Context:
    """The little that the policy reads of Serve's context."""

    target_num_replicas: int
    app_name: str = "mell"
    deployment_name: str = SOLE_POOL


NOW = 1000.0


def mirrored() -> tuple[int, dict[str, Any]]:
    """The policy's number for Serve at `NOW`, while Serve's own target is 2."""
    return MirrorWanted(lambda: NOW)(Context(2))


def test_the_schedulers_number_counts() -> None:
    write_wanted("mell", SOLE_POOL, "g", Wanted(5, NOW))
    assert mirrored() == (5, {})


@pytest.mark.parametrize(
    ("app", "pool", "generation", "age_s"),
    [
        ("other", SOLE_POOL, "g", 0.0),
        ("mell", "Other", "g", 0.0),
        ("mell", SOLE_POOL, "earlier", 0.0),
        ("mell", SOLE_POOL, "g", STALE_S + 1),
    ],
    ids=["another application", "another pool", "another start of Serve", "stale"],
)
def test_without_a_fresh_number_the_target_stays(app: str, pool: str, generation: str, age_s: float) -> None:
    write_wanted(app, pool, generation, Wanted(5, NOW - age_s))
    assert mirrored() == (2, {})


@pytest.mark.parametrize("garbage", [b"", b"{}", b"5", b'{"count": 1}'])
def test_an_unreadable_value_is_no_number(store: dict[bytes, bytes], garbage: bytes) -> None:
    write_wanted("mell", SOLE_POOL, "g", Wanted(5, NOW))
    store.update(dict.fromkeys(store, garbage))
    assert read_wanted("mell", SOLE_POOL, "g") is None
    assert mirrored() == (2, {})


@dataclass(frozen=True)
class Id:
    """A replica's id, as Serve has it."""

    unique_id: str


@dataclass
class Replica:
    """A replica, as Serve has it."""

    replica_id: Id


@dataclass
class Controller:
    """Serve's controller with one deployment; it notes what is done to it."""

    running: list[Replica]
    stopped: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    target: int | None = None

    def __post_init__(self) -> None:
        self.deployment_state_manager: Any = self
        self._deployment_states = {DeploymentID(SOLE_POOL, "mell"): self}
        self._replicas = self

    def get(self, states: list[ReplicaState]) -> list[Replica]:
        return self.running if ReplicaState.RUNNING in states else []

    def stop_replicas(self, replicas: set[Id]) -> None:
        self.stopped += [r.unique_id for r in replicas]
        self.threads.add(threading.get_ident())

    def set_target_num_replicas(self, deployment: DeploymentID, count: int) -> None:
        self.target = count


def test_just_that_replica_is_stopped_and_the_number_follows() -> None:
    controller = Controller([Replica(Id("a")), Replica(Id("b")), Replica(Id("c"))])
    assert stop_exactly(controller, "mell", SOLE_POOL, "b", 2)
    assert (controller.stopped, controller.target) == (["b"], 2)
    assert MirrorWanted()(Context(3)) == (2, {}), "or the next step would start another"


async def test_a_replica_is_stopped_between_two_steps_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes the call in a thread of its own."""
    controller = Controller([Replica(Id("a"))])
    ends = asyncio.Event()

    async def run_control_loop() -> None:
        await ends.wait()

    monkeypatch.setattr("ray._common.utils._BACKGROUND_TASKS", {asyncio.create_task(run_control_loop())})
    await asyncio.sleep(0)
    call = asyncio.to_thread(stop_exactly, controller, "mell", SOLE_POOL, "a", 1)
    assert await call and controller.threads == {threading.get_ident()}
    ends.set()


def test_of_a_replica_that_is_gone_nothing_changes() -> None:
    controller = Controller([Replica(Id("a"))])
    assert not stop_exactly(controller, "mell", SOLE_POOL, "b", 0)
    assert (controller.stopped, controller.target) == ([], None)
    assert read_wanted("mell", SOLE_POOL, "g") is None


# --- Serve's own rule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("counts", "running", "wanted"), [((8, 8), 2, 4), ((2, 0), 2, 0.5), ((), 1, 0)])
def test_serves_own_rule_counts_the_requests_that_replicas_report(
    counts: tuple[int, ...], running: int, wanted: float
) -> None:
    context = AutoscalingContext(
        deployment_id=DeploymentID(SOLE_POOL, "mell"),
        deployment_name=SOLE_POOL,
        app_name="mell",
        current_num_replicas=running,
        target_num_replicas=running,
        running_replicas=[],
        total_num_requests=1000,
        total_queued_requests=0,
        aggregated_metrics={scaling.REQUESTS: dict(enumerate(counts))},
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=10,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=AutoscalingConfig(target_ongoing_requests=4),
    )
    assert CountRequests()(context)[0] == wanted
    assert context.total_num_requests == 1000
