"""`mell serve` with adapters, and with a pooling model, by vLLM's flags; `test_8_wheel` has another model.

MELL_TEST_LONG adds both: each starts an application.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from app.tinymodel import ensure_tiny_model
from tests.adapters import ADAPTERS, RANK, TARGETS
from tests.counts import LONG_ONLY
from tests.integration.conftest import ROOT, Stage, free_port, wait_until_healthy
from tests.integration.pooling_models import CONTEXT, ensure_encoder
from tests.integration.test_8_pooling import NOISE, TEXTS, tokens_of, vector_of

pytestmark = LONG_ONLY

BODY = {"model": "./model", "prompt": "Blocks move", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@contextmanager
def served(folder: Path, model: Path, *flags: str) -> Iterator[httpx.Client]:
    """A client of `mell serve ./model`, started in `folder`; its output goes to `serve.log` there."""
    (folder / "model").symlink_to(model)
    url = f"http://127.0.0.1:{(port := free_port())}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-P", "-m", "app.cli", "serve", "./model", *flags, "--port", str(port)]
    log = folder / "serve.log"
    with log.open("w") as output:
        mell = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    try:
        wait_until_healthy(mell, url, log)
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            yield client
    finally:
        mell.terminate()
        status = mell.wait(60)
    assert status == 0


def test_adapters_are_served(stage: Stage, tmp_path: Path) -> None:
    stage.clear()
    lora = ["--enable-lora", "--max-loras", str(len(ADAPTERS) + 1), "--max-lora-rank", str(RANK)]
    lora += ["--lora-target-modules", *TARGETS, "--lora-modules", *stage.lora_modules]
    with served(tmp_path, ensure_tiny_model(), "--max-model-len", "512", *lora) as client:
        models = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert models == ["./model", *ADAPTERS]
        answers = [client.post("/v1/completions", json=BODY | {"model": model}) for model in models]
        assert [answer.status_code for answer in answers] == [200] * len(models)
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == len(models)
        assert client.post("/v1/completions", json=BODY | {"model": "other"}).status_code == 404


def test_a_pooling_model_is_served(stage: Stage, tmp_path: Path) -> None:
    stage.clear()
    with served(tmp_path, ensure_encoder(), "--runner", "pooling", "--max-model-len", str(CONTEXT)) as client:
        answer = client.post("/v1/embeddings", json={"model": "./model", "input": TEXTS})
        assert answer.status_code == 200, answer.text
        made = [np.array(each["embedding"]) for each in answer.json()["data"]]
        assert np.allclose(made, [vector_of(tokens_of(text)) for text in TEXTS], atol=NOISE)
        assert client.post("/v1/completions", json=BODY).status_code == 404
