"""`mell serve` starts what its flags describe: a model in a folder beside the user, with vLLM's flags and a key."""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from app.tinymodel import ensure_tiny_model
from tests.integration.conftest import ROOT, Stage, free_port, wait_until_healthy

FLAGS = (
    "--max_model_len 512 --num-gpu-blocks-override 64 --max-num-seqs 4 --uvicorn-log-level warning "
    "--fingerprint-mode custom --fingerprint-value mine"
)
KEY = {"Authorization": "Bearer secret"}


def test_a_model_is_served_by_the_flags_of_vllm(stage: Stage, tmp_path: Path) -> None:
    stage.clear()
    (tmp_path / "model").symlink_to(ensure_tiny_model())
    url = f"http://127.0.0.1:{(port := free_port())}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "VLLM_API_KEY": "secret"}
    command = [sys.executable, "-P", "-m", "app.cli", "serve", "./model", *FLAGS.split(), "--port", str(port)]
    log = tmp_path / "serve.log"
    with log.open("w") as output:
        mell = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        wait_until_healthy(mell, url, log)
        body = {"model": "./model", "prompt": "Blocks move", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            answer = client.post("/v1/completions", json=body, headers=KEY)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
            assert answer.json()["system_fingerprint"] == "mine"
            too_long = client.post("/v1/completions", json=body | {"max_tokens": 600}, headers=KEY)
            assert too_long.status_code == 400 and "512" in too_long.text
            (replica,) = client.get("/mell/state").json()["replicas"]
            assert replica["capacity_tokens"] == 63 * 32
            assert client.post("/v1/completions", json=body).status_code == 401
    finally:
        mell.terminate()
        status = mell.wait(60)
    assert status == 0
    assert "--uvicorn-log-level has no effect" in log.read_text() and "secret" not in log.read_text()
