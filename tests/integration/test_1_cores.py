"""Engines beside other programs on the cores of their node."""

import asyncio

import psutil

from tests.integration.application import Application, prompt
from tests.niceness import lowers_niceness


@lowers_niceness
async def test_replicas_and_engines_have_the_niceness_of_their_raylet(application: Application) -> None:
    async with application.client() as client:
        for replica in await client.running():
            raylet = psutil.Process(replica["pids"][0]).parent()
            assert raylet is not None and "raylet" in raylet.name()
            assert {psutil.Process(pid).nice() for pid in replica["pids"]} == {raylet.nice()}


async def test_an_engine_that_waits_leaves_its_cores_to_others(application: Application) -> None:
    async with application.client() as client:
        await client.complete(prompt(50, "cores"), 50)
        engines = [psutil.Process(pid) for replica in await client.running() for pid in replica["pids"]]
        before = [sum(engine.cpu_times()[:2]) for engine in engines]
        await asyncio.sleep(0.7)  # vLLM's readers would look for messages all the time, for a second after each
        used = [sum(engine.cpu_times()[:2]) - first for engine, first in zip(engines, before, strict=True)]
        assert max(used) < 0.35, used
