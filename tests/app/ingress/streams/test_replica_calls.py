"""Submissions to one replica: those that its engine can begin do not wait for those that it cannot."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.ingress.streams.placing import Placer
from app.ingress.streams.replica_calls import EngineCalls
from deployments.api.calls import Submission
from deployments.replica.ingress_channels import submit_all
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import Adapter
from policies.decision.placement import Place
from policies.model import ReplicaId

pytestmark = pytest.mark.virtual_time

HERE = ReplicaId("here")
COLD, WARM = Adapter("cold", 1, "/cold"), Adapter("warm", 2, "/warm")


class ColdReplica:
    """A replica that loads one adapter in two seconds, and has the others. `calls` are the requests of each call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def at(self, replica: ReplicaId) -> "ColdReplica":
        return self

    async def submit(self, requests: tuple[Submission, ...]) -> Any:
        self.calls.append([each.spec.id for each in requests])
        await asyncio.sleep(0.02)
        return await submit_all(requests, lambda request: "m", self._lacks)

    async def _lacks(self, adapter: Adapter) -> None:
        await asyncio.sleep(2.0 if adapter == COLD else 0.0)


async def test_one_cold_adapter_holds_up_no_other_request() -> None:
    replica, placer = ColdReplica(), SimpleNamespace(take=lambda request, at: Place(at))
    calls, took = EngineCalls(cast(Any, replica), cast(Placer, placer)), dict[str, float]()

    async def one(name: str, adapter: Adapter | None, after_s: float) -> None:
        await asyncio.sleep(after_s)
        began = asyncio.get_running_loop().time()
        assert await calls.submit(HERE, replace(plain_spec(name, (1,), 4), adapter=adapter), 0, (), None) == "m"
        took[name] = asyncio.get_running_loop().time() - began

    others = [(f"{kind}{i}", adapter) for i in range(4) for kind, adapter in (("plain", None), ("warm", WARM))]
    began = [one(name, adapter, 0.01 + 0.001 * i) for i, (name, adapter) in enumerate(others)]
    await asyncio.gather(one("cold", COLD, 0.0), one("cold-again", COLD, 0.1), *began)
    assert took.pop("cold") > 2.0 and took.pop("cold-again") > 1.9
    assert max(took.values()) < 0.1
    assert len(replica.calls) == 6, "those of one kind that come during a call share the next"
