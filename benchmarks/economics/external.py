"""An autoscaler beside the application: it reads the state, and writes the number of replicas for Serve.

It scales by the KV cache in use, with the simulator's rule. Mell's scheduler decides on no replica meanwhile.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray

from app.client.documents import StateDocument
from deployments.serve.retirement import generation
from deployments.serve.scaling import Wanted, write_wanted
from policies.model import SOLE_POOL, Phase
from simulator.autoscaling.fleet import TICK_S
from simulator.replay.probe import MellProbe
from simulator.replay.run import every

_APP = "mell"
"""The application's name in the configurations of benchmarks."""


def kv_in_use(state: StateDocument) -> float:
    """The KV caches in use, queued prompts included, in replicas: the load of `LoadMeasure.KV`."""
    return sum(
        (r.used_tokens + sum(q.tokens for q in r.requests if q.phase == Phase.WAITING)) / r.capacity_tokens
        for r in state.replicas
        if r.capacity_tokens
    )


@contextmanager
def number_of_replicas() -> Iterator[Callable[[int], None]]:
    """A function that writes the number of replicas for Serve, on the one Ray cluster of this machine.

    Serve ignores numbers that are older than 15 s.
    """
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    try:
        serve = generation()
        yield lambda count: write_wanted(_APP, SOLE_POOL, serve, Wanted(count, time.time()))
    finally:
        ray.shutdown()


async def follow(observe: Callable[[float, float, int], int], probe: MellProbe, write: Callable[[int], None]) -> None:
    """Write the number of replicas twice a second, until cancelled. A poll that fails changes nothing.

    `observe` is that of an `Autoscaler`: the number from the time in seconds, the load and the running replicas.
    """
    clock = asyncio.get_running_loop().time

    async def look() -> None:
        if (state := await probe.state()) is not None:
            write(observe(clock(), kv_in_use(state), len(state.running)))

    await every(TICK_S, look)
