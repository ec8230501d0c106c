"""Two models in one application: each answers its own requests, whatever moves, and one does without the other."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from app.tinymodel import ensure_tiny_model
from tests.adapters import make_adapter
from tests.counts import LONG_ONLY
from tests.integration.application import Answer, Application, Client, eventually, processes, prompt, total
from tests.integration.conftest import ADAPTER_KWARGS, BLOCKS, ROOT, Stage, free_port
from tests.integration.pooling_models import ensure_encoder
from tests.integration.runs import COMMANDS, SERVE_RUN, Run, wait_until
from tests.integration.two_models import ensure_other_model, is_of_other, is_of_tiny

pytestmark = LONG_ONLY

START_S = 480
OURS = {"tiny": is_of_tiny, "other": is_of_other}
OTHER = {"tiny": "other", "other": "tiny"}
LENGTH, AT = 160, (8, 60)


def _entry(name: str, source: Path) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": name, "model_source": str(source)},
        "engine_kwargs": {"max_model_len": 2048, "max_num_seqs": 16, "num_gpu_blocks_override": BLOCKS},
        "deployment_config": {
            "num_cpus": 0.1,
            "health_check_timeout_s": 60.0,
            "autoscaling_config": {"min_replicas": 2, "max_replicas": 2},
        },
    }


@contextmanager
def _started(stage: Stage, port: int, args: dict[str, Any]) -> Iterator[Run]:
    """`serve run` of an application with these settings."""
    application = {"name": "mell", "import_path": "mell:build_app", "route_prefix": "/", "args": args}
    path = stage.folder / "models.yaml"
    path.write_text(yaml.safe_dump({"proxy_location": "Disabled", "applications": [application]}))
    run = Run([*COMMANDS[SERVE_RUN], str(path)], port, stage.folder)
    try:
        yield run
    finally:
        run.close()


@pytest.fixture(scope="module")
def two_models_run(stage: Stage) -> Iterator[Run]:
    """Two replicas of either of two models, under `serve run`."""
    stage.clear()
    port = free_port()
    args = {
        "llm_configs": [_entry("tiny", ensure_tiny_model()), _entry("other", ensure_other_model())],
        "ingress": {"port": port, "replica_silence_s": 4.0, "place_timeout_s": 10.0},
        "scheduler": {"mode": "off", "epoch_s": 0.5},
    }
    with _started(stage, port, args) as run:
        wait_until(run.healthy, START_S)
        yield run


@pytest.fixture
def two_models(two_models_run: Run, stage: Stage) -> Application:
    """Their application."""
    return Application(two_models_run.url, faults=Path(), capacity=0, folder=stage.folder)


def _ask(model: str, number: int) -> list[int]:
    return prompt(24 + 8 * number, f"{model}/{number}")


async def _moved(client: Client, model: str, number: int) -> Answer:
    """A stream of a model that moves twice, to the model's other replica and back."""
    answer, label = Answer(), f"{model}-{number}"
    reading = asyncio.create_task(client.stream(answer, _ask(model, number), LENGTH, label, model=model))
    for at in AT:
        await answer.until(at)
        assert not answer.done, answer.error
        ordered = await client.move(label)
        assert ordered.status_code == 202, ordered.text
        record = await client.outcome(ordered.json()["id"])
        assert (record["outcome"], record["pool"]) == ("committed", f"Engine-{model}"), record
    await reading
    return answer


async def test_each_model_answers_its_own_requests_while_they_move(two_models: Application) -> None:
    cases = [(model, number) for number in range(3) for model in OURS]
    async with two_models.client() as client:
        expected = [(await client.complete(_ask(*case), LENGTH, model=case[0]))[0] for case in cases]
        answers = await asyncio.gather(*(_moved(client, *case) for case in cases))
        assert [answer.text for answer in answers] == expected
        for (model, _), answer in zip(cases, answers, strict=True):
            assert OURS[model](answer.text) and not OURS[OTHER[model]](answer.text), answer.text
        # The same prompt is another answer of the other model.
        same = [(await client.complete(_ask("tiny", 0), LENGTH, model=model))[0] for model in OURS]
        assert same[0] == expected[0] and same[0] != same[1] and is_of_other(same[1])
        await client.idle()


async def test_models_are_listed_and_others_do_not_exist(two_models: Application) -> None:
    async with two_models.client() as client:
        listed = (await client.http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "other"]
        wrong = await client.http.post("/v1/completions", json={"model": "third", "prompt": "x"})
        assert wrong.status_code == 404 and "`third` does not exist" in wrong.json()["error"]["message"]
        missing = await client.http.post("/v1/completions", json={"prompt": "x"})
        assert missing.status_code == 400 and "other, tiny" in missing.json()["error"]["message"]
        state = await client.state()
        assert [model["model"] for model in state["models"]] == ["tiny", "other"]
        assert sorted(replica["model"] for replica in state["replicas"]) == ["other", "other", "tiny", "tiny"]
        families = await client.metrics()
        for model in OURS:
            assert total(families, "mell_requests_total", model=model, outcome="length") > 0
            assert total(families, "vllm:request_success_total", model_name=model) > 0
            assert total(families, "vllm:generation_tokens_total", model_name=model) > 0


async def test_operators_orders_find_the_model_of_a_request_or_replica(two_models: Application) -> None:
    async with two_models.client() as client:
        replicas = await client.running()
        other = next(replica["id"] for replica in replicas if replica["model"] == "other")
        answer, label = Answer(), "across"
        reading = asyncio.create_task(client.stream(answer, _ask("tiny", 0), LENGTH, label, model="tiny"))
        await answer.until(8)
        refused = await client.move(label, target=other)
        assert refused.status_code == 422 and other not in refused.json()["error"]["replicas"], refused.text
        await reading
        unknown = await client.drain("none")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["replicas"] == sorted(replica["id"] for replica in replicas)
        bounds = {"min_replicas": 1, "max_replicas": 2}
        assert (await client.http.post("/mell/bounds", json=bounds)).status_code == 400
        ordered = await client.http.post("/mell/bounds", json=bounds | {"model": "other"})
        assert ordered.status_code == 422 and "scheduler.mode is off" in ordered.json()["error"]["message"]
        found = await client.http.post("/mell/cache/match", json={"prompt": [5, 6, 7], "model": "other"})
        owners = {replica["id"]: replica["model"] for replica in replicas}
        assert [owners[replica["id"]] for replica in found.json()["replicas"]] == ["other", "other"]
        handed = await client.http.get("/mell/hand-over")
        assert handed.status_code == 422 and "several models" in handed.json()["error"]["message"]


async def test_operators_see_the_models(two_models: Application) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "app.cli", "status", "--url", two_models.url),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "140"},
    )
    shown = (await process.communicate())[0].decode()
    assert "model tiny: 2 of 2 wanted replicas running" in shown and "RUNNING other" in shown, shown
    async with two_models.client() as client, client.http.stream("GET", "/mell/events") as events:
        lines = events.aiter_lines()
        while not (line := await anext(lines)).startswith("data: "):
            pass
        models = [model for *_, model, _ in json.loads(line.removeprefix("data: "))["replicas"]]
        assert sorted(models) == ["other", "other", "tiny", "tiny"]


def _replica_processes(model: str) -> list[psutil.Process]:
    return processes(f"ServeReplica:mell:Engine-{model}")


async def test_a_model_without_replicas_does_not_hold_up_the_other(two_models: Application) -> None:
    """Its requests wait for a replica, and are answered by one; the other's are answered meanwhile."""
    async with two_models.client() as client:
        text, _ = await client.complete(_ask("other", 0), 32, model="other")
        for process in _replica_processes("other"):
            process.send_signal(signal.SIGKILL)
        waiting = asyncio.create_task(client.complete(_ask("other", 0), 32, model="other"))
        began = time.monotonic()
        for number in range(10):
            answer, _ = await client.complete(_ask("tiny", number), 16, model="tiny")
            assert answer
        took_s = time.monotonic() - began
        assert not waiting.done(), "the killed replicas take longer to start than ten short answers"
        assert (await client.http.get("/health")).status_code == 200
        assert (await waiting)[0] == text
        print(f"ten answers of the one model in {took_s:.1f} s, the other's after {time.monotonic() - began:.1f} s")

        async def two_run() -> bool:
            return [replica["model"] for replica in await client.running()].count("other") == 2

        await eventually(two_run, START_S)


@pytest.fixture(scope="module")
def paced_models_run(stage: Stage) -> Iterator[Run]:
    """One or two replicas of either of two models that keep the pace of a GPU, opened and closed by the scheduler."""
    stage.clear()
    port = free_port()
    engine = {
        "num_gpu_blocks_override": 64,
        "block_size": 16,
        "max_model_len": 1000,
        "decode_s": 0.02,
        "startup_s": 1.0,
    }
    scaling = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}, "num_cpus": 0.05}
    args = {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": name},
                "engine": "paced",
                "engine_kwargs": engine,
                "deployment_config": scaling,
            }
            for name in OURS
        ],
        "ingress": {"port": port},
        "scheduler": {"mode": "act", "epoch_s": 0.5, "linger_s": 3.0, "foresight_s": 0.0},
    }
    with _started(stage, port, args) as run:
        wait_until(run.healthy, START_S)
        yield run


async def test_replicas_of_a_model_open_and_close_by_its_own_demand(paced_models_run: Run, stage: Stage) -> None:
    """Four requests of one model fill more than a replica of it: a second one opens, and none of the other model."""
    application = Application(paced_models_run.url, faults=Path(), capacity=0, folder=stage.folder)
    most: dict[str, int] = dict.fromkeys(OURS, 0)

    async def watch(client: Client) -> dict[str, int]:
        running = [replica["model"] for replica in await client.running()]
        for name in OURS:
            most[name] = max(most[name], running.count(name))
        return {name: running.count(name) for name in OURS}

    async with application.client() as client:
        asked = [client.complete(prompt(100, number), 300, model="tiny") for number in range(4)]
        asking = asyncio.gather(*asked)

        async def opened() -> bool:
            return (await watch(client)) == {"tiny": 2, "other": 1}

        await eventually(opened, 120)
        assert all(text for text, _ in await asking)

        async def closed() -> bool:
            return (await watch(client)) == {"tiny": 1, "other": 1}

        await eventually(closed, 120)
        assert most == {"tiny": 2, "other": 1}


@pytest.fixture(scope="module")
def mixed_models_run(stage: Stage) -> Iterator[Run]:
    """A model that embeds texts, and one that generates and has adapters; it answers before any engine runs."""
    stage.clear()
    port, deployment = free_port(), {"num_cpus": 0.1, "health_check_timeout_s": 60.0}
    chat = _entry("tiny", ensure_tiny_model()) | {"deployment_config": deployment}
    chat["engine_kwargs"] |= ADAPTER_KWARGS
    args = {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": "vectors", "model_source": str(ensure_encoder())},
                "deployment_config": deployment,
            },
            chat,
        ],
        "ingress": {"port": port, "admin_key": KEY, "allow_runtime_lora_updating": True},
        "scheduler": {"mode": "off"},
    }
    with _started(stage, port, args) as run:

        def listening() -> bool:
            assert run.process.poll() is None, run.output
            try:
                return httpx.get(f"{run.url}/live", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(listening, START_S)
        yield run


KEY = "admin-key"


async def test_a_pooling_model_stands_beside_one_with_adapters(mixed_models_run: Run, stage: Stage) -> None:
    """Its application is made once its replica runs, and requests wait for it; the other's is there at once."""
    application = Application(mixed_models_run.url, faults=Path(), capacity=0, folder=stage.folder, admin_key=KEY)
    async with application.client() as client:

        async def listed() -> list[str]:
            return [model["id"] for model in (await client.http.get("/v1/models")).json()["data"]]

        async def load(**body: str) -> httpx.Response:
            order = {"lora_name": "sql", "lora_path": str(folder), **body}
            return await client.http.post("/v1/load_lora_adapter", json=order)

        assert await listed() == ["tiny"], "no replica of the other has run yet"
        embedded = await client.http.post("/v1/embeddings", json={"model": "vectors", "input": "x"}, timeout=START_S)
        assert embedded.status_code == 200, embedded.text
        answer, _ = await client.complete("hello", 4, model="tiny")
        assert answer and await listed() == ["vectors", "tiny"]
        for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/chat/completions", {"messages": []})):
            model = "tiny" if path == "/v1/embeddings" else "vectors"
            assert (await client.http.post(path, json={"model": model, **body})).status_code == 404
        folder = make_adapter(stage.folder / "sql", 0)
        assert (await load()).status_code == 400 and (await load(base_model_name="vectors")).status_code == 400
        taken = await load(base_model_name="tiny", lora_name="vectors")
        assert taken.status_code == 400 and "the name of another model" in taken.text
        assert (await load(base_model_name="tiny")).status_code == 200
        assert await listed() == ["vectors", "tiny", "sql"]
        answer, body = await client.complete("hello", 4, model="sql")
        assert answer and body["model"] == "sql"
