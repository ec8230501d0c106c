"""vLLM's own disaggregation: two servers with its NIXL connector, one for prefills and one for decoding.

It needs the package `nixl`. The client does what vLLM's proxy example does: the first server prefills the prompt and
answers with one token and the names of its blocks; the second server reads these, computes what is left of the prompt
and streams. There is no proxy process, which favours vLLM.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from benchmarks.load import TimedStream, stream
from benchmarks.servers import MODEL, Rig, bare_vllm

_ROLES = ("kv_producer", "kv_consumer")
_SIDE_CHANNEL = 5600
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The transfer parameters of a request that another server decodes, as in vLLM's proxy example."""


@contextmanager
def nixl_pair(port: int, rig: Rig, flags: Sequence[str]) -> Iterator[None]:
    """Run both servers, for prefills at `port` and for decoding at the next one."""
    with ExitStack() as stack:
        for i, role in enumerate(_ROLES):
            config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": rig.device}
            transfer = ("--kv-transfer-config", json.dumps(config))
            channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_SIDE_CHANNEL + i)}
            stack.enter_context(bare_vllm(port + i, rig, flags=[*flags, *transfer], environment=channel))
        yield


async def handed_over(client: httpx.AsyncClient, port: int, prompt: list[int], output: int, label: str) -> TimedStream:
    """A streamed answer by both servers, sent at the time of its prefill. Raises httpx.HTTPError, RuntimeError."""
    sent = time.perf_counter()
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body | {"kv_transfer_params": _ASKED})
    answer.raise_for_status()
    more = {"kv_transfer_params": answer.json()["kv_transfer_params"]}
    read = await stream(port + 1, MODEL, prompt, output, label, more=more)
    read.sent = sent
    return read


async def read_bytes(client: httpx.AsyncClient, port: int) -> float:
    """The bytes that the second server has read from the first so far, by its metrics. Raises httpx.HTTPError."""
    answer = await client.get(f"http://127.0.0.1:{port + 1}/metrics")
    answer.raise_for_status()
    return sum(map(float, re.findall(r"^vllm:nixl_bytes_transferred_sum\{.*\} (\S+)$", answer.text, re.MULTILINE)))
