"""Two models on a budget that has no room for both: the idle one sleeps so that the other one wakes."""

import asyncio
import re

from tests.counts import LONG_ONLY
from tests.integration.application import Application, Client, eventually, prompt

MODELS = "tiny", "middle"


async def are(client: Client, **states: str) -> bool:
    """True if the models' replicas report these states."""
    return {r["model"]: r["state"] for r in (await client.state())["replicas"]} == states


@LONG_ONLY
async def test_an_idle_model_sleeps_for_one_that_wakes(crowded: Application) -> None:
    """A size by hand does not shrink: so the other model lacks room to wake until this one sleeps."""
    async with crowded.client() as client:
        await client.settle()
        asked = {model: prompt(300, f"turns {model}") for model in MODELS}
        want = {model: (await client.complete(asked[model], 20, model=model))[0] for model in MODELS}
        for model in MODELS:
            body = {"model": model, "min_replicas": 0, "max_replicas": 1}
            assert (await client.http.post("/mell/bounds", json=body)).status_code == 200
        assert (await client.http.post("/mell/models/middle/sleep")).status_code == 202
        await eventually(lambda: are(client, tiny="RUNNING", middle="ASLEEP"), within_s=60)
        (tiny,) = await client.running()
        refused = await client.set_memory(tiny["id"], tiny["memory"]["declared_blocks"])
        (largest,) = re.findall(r"can have (\d+) blocks", refused.text)
        assert (await client.set_memory(tiny["id"], int(largest))).status_code == 202
        assert (await client.complete(asked["tiny"], 20, model="tiny"))[0] == want["tiny"]
        # `linger_s` is longer: the time of a start.
        async with asyncio.timeout(30):
            assert (await client.complete(asked["middle"], 20, model="middle"))[0] == want["middle"]
        assert await are(client, tiny="ASLEEP", middle="RUNNING"), (await client.state())["devices"]
        assert (await client.complete(asked["tiny"], 20, model="tiny"))[0] == want["tiny"]
