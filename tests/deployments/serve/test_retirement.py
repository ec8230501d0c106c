"""Stopping one particular replica: what Serve's controller answers, and what becomes of it."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.config import AutoscalingPolicy

from deployments.serve import retirement, scaling
from deployments.serve.retirement import retire
from migration.protocol.errors import PeerLost, Refused
from policies.model import ReplicaId

pytestmark = pytest.mark.virtual_time


class Controller:
    """Serve's controller with one answer: a value, an error, or none ("silent")."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.__ray_call__ = self

    async def remote(self, *args: Any) -> Any:
        if self.answer == "silent":
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def stop(monkeypatch: pytest.MonkeyPatch, answer: Any) -> bool:
    monkeypatch.setattr(retirement, "controller", lambda: Controller(answer))
    return await retire("mell", "Engine", ReplicaId("a"), 2)


@pytest.mark.parametrize("fault", ["silent", ActorUnavailableError("away", None), ValueError("there is no such actor")])
async def test_a_controller_that_is_away_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    with pytest.raises(PeerLost, match="controller does not answer"):
        await stop(monkeypatch, fault)


async def test_a_replica_that_serve_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="does not run"):
        await stop(monkeypatch, False)
    assert await stop(monkeypatch, True)


async def test_a_version_of_serve_without_the_call_answers_false(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await stop(monkeypatch, RayTaskError("stop_exactly", "traceback", AttributeError("stop_replicas")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MirrorWanted", "CountRequests", "stop_exactly"])
def test_the_code_for_serves_controller_comes_along(name: str) -> None:
    """Serve's controller may run where Mell is not installed."""
    if name == "stop_exactly":
        cloudpickle.register_pickle_by_value(scaling)  # Serve ends that with each policy that it pickles.
        sent = cloudpickle.dumps(scaling.stop_exactly)
    else:
        sent = AutoscalingPolicy(policy_function=f"deployments.serve.scaling:{name}")._serialized_policy_def
    load = f"""
import pickle, sys
class NoMell:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("deployments", "migration", "policies"):
            raise ImportError(name)
sys.meta_path.insert(0, NoMell())
print(pickle.loads({sent!r}).__name__)
"""
    ended = subprocess.run([sys.executable, "-P", "-c", load], capture_output=True, text=True)
    assert ended.stdout == f"{name}\n", ended.stderr
