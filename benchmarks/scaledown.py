"""Removal of one of two replicas while long answers run on both: Mell, and plain Ray Serve.

    python -m benchmarks.scaledown [--streams 8] [--tokens 2000] [--grace 30] [--device cuda]

Both run the same paced engines (`deployments.engine.paced`), or vLLM's on GPUs, two replicas with streams on both. Then
one is removed: in Mell by `POST /mell/replicas/{id}/drain`, in Ray Serve by a target of one replica instead of two.
Printed are the seconds until the replica has gone, and the number of whole streams: those with the tokens of an
undisturbed run or, on GPUs, where a text depends on the batch, with their number of tokens.
`--grace` is Serve's `graceful_shutdown_timeout_s` for both. The exit status is 1 if Mell broke a stream.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from app.client.api import ApiClient
from benchmarks.chaos.offers import undisturbed
from benchmarks.instruments.admin import Admin
from benchmarks.load import random_prompt
from benchmarks.servers import PACED, Rig, add_rig_options, mell
from deployments.engine.port import Engine
from deployments.engine.tokens import expected

PORT = 8100
ENGINE = PACED | {"num_gpu_blocks_override": 2048}
PROMPT = 100
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RemovalResult:
    """The result of one removal. `gone_s` is None if the replica outlived the answers."""

    gone_s: float | None
    whole: int
    broken: int


def main() -> int:
    """Measure and print both; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8, help="long answers, half of them on each replica")
    parser.add_argument(
        "--tokens", type=int, default=2000, help="tokens of each, at 50 per second or less from paced engines"
    )
    parser.add_argument("--grace", type=float, default=30.0, help="graceful_shutdown_timeout_s, in seconds")
    add_rig_options(parser)
    options = parser.parse_args()
    ours = _mell(options)
    print(_line("Mell", ours), flush=True)
    theirs = asyncio.run(_serve(options))
    print(_line("Ray Serve", theirs))
    return 1 if ours.broken else 0


def _line(name: str, outcome: RemovalResult) -> str:
    gone = "did not go" if outcome.gone_s is None else f"was gone after {outcome.gone_s:.1f} s"
    return f"{name}: the replica {gone}; {outcome.whole} streams whole, {outcome.broken} broken"


# --- Mell ---------------------------------------------------------------------------------------------


def _mell(options: argparse.Namespace) -> RemovalResult:
    deployment = {
        "num_cpus": 0.05,
        "graceful_shutdown_timeout_s": options.grace,
        "autoscaling_config": {"min_replicas": 1, "initial_replicas": 2, "max_replicas": 2},
    }
    scheduler = {"policy": "worst_fit", "mode": "off", "epoch_s": 0.5}
    rig = Rig.of(options)
    engine: dict[str, Any] = {} if rig.device == "cuda" else {"engine": "paced", "engine_kwargs": ENGINE}
    with mell(PORT, 2, rig, deployment_config=deployment, scheduler=scheduler, **engine):
        return asyncio.run(_drain(options))


async def _drain(options: argparse.Namespace) -> RemovalResult:
    async with Admin(PORT) as admin, ApiClient(f"http://127.0.0.1:{PORT}") as server:

        def read(prompt: list[int]) -> AsyncIterator[str]:
            return _completion(server, prompt, options.tokens)

        def is_whole(prompt: list[int], pieces: list[str]) -> bool:
            on_gpus: bool = options.device == "cuda"
            return on_gpus or "".join(pieces) == undisturbed(tuple(prompt), options.tokens)

        async def one_less() -> Callable[[], Awaitable[bool]]:
            victim = (await admin.replicas())[-1]
            await admin.drain(victim)

            async def gone() -> bool:
                return victim not in await admin.replicas()

            return gone

        return await _remove(options, read, is_whole, one_less)


async def _completion(server: ApiClient, prompt: list[int], tokens: int) -> AsyncIterator[str]:
    """The text of a stream from Mell. Raises ClientError, and ConnectionError for an error event or a missing end."""
    finish = None
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with server.stream(body) as events:
        async for event in events:
            if "error" in event:
                raise ConnectionError(event["error"]["message"])
            yield event["choices"][0]["text"]
            finish = event["choices"][0]["finish_reason"]
    if finish != "length":
        raise ConnectionError(f"the stream ended with {finish}")


# --- Ray Serve ----------------------------------------------------------------------------------------


async def _serve(options: argparse.Namespace) -> RemovalResult:
    import ray
    from ray import serve
    from ray.serve._private.common import DeploymentID

    from deployments.serve.internals import controller
    from migration.protocol.continuing import plain_spec
    from migration.run.outputs import running

    rig = Rig.of(options)

    class Plain:
        """One engine behind Serve's own handles: a typical deployment without Mell."""

        async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
            self._engine = await _plain_engine(rig)
            self._count = 0

        async def generate(self, prompt: list[int], tokens: int) -> AsyncIterator[list[int]]:
            """The tokens of each step."""
            self._count += 1
            key = f"r{self._count}"
            async with running(self._engine, key, plain_spec(key, tuple(prompt), tokens, ignore_eos=True)) as steps:
                async for step in steps:
                    yield list(step.tokens)

    resources = {"num_cpus": 0.1} | rig.mell_settings().get("deployment_config", {})
    environment = {"env_vars": rig.environment} if rig.device == "cuda" else {}
    ray.init(logging_level="ERROR", namespace="serve", num_cpus=4, runtime_env=environment)
    deployment = serve.deployment(
        Plain, graceful_shutdown_timeout_s=options.grace, max_ongoing_requests=1000, ray_actor_options=resources
    )
    try:
        bound = deployment.options(num_replicas=2).bind()
        handle = await asyncio.to_thread(lambda: serve.run(bound, name="plain", external_scaler_enabled=True))
        streaming = handle.options(stream=True)

        async def read(prompt: list[int]) -> AsyncIterator[str]:
            async for step in streaming.generate.remote(prompt, options.tokens):
                yield "".join(f"{token} " for token in step)

        def is_whole(prompt: list[int], pieces: list[str]) -> bool:
            received = "".join(pieces).split()
            if rig.device == "cuda":
                return bool(len(received) == options.tokens)
            return received == [str(token) for token in expected(tuple(prompt), options.tokens)]

        async def one_less() -> Callable[[], Awaitable[bool]]:
            await controller().update_deployment_replicas.remote(DeploymentID("Plain", "plain"), 1)

            async def gone() -> bool:
                details: dict[str, Any] = await controller().get_serve_instance_details.remote()
                return len(details["applications"]["plain"]["deployments"]["Plain"]["replicas"]) == 1

            return gone

        return await _remove(options, read, is_whole, one_less)
    finally:
        await asyncio.to_thread(serve.shutdown)
        ray.shutdown()


async def _plain_engine(rig: Rig) -> Engine:
    """An engine without Mell around it."""
    if rig.device == "cuda":
        from deployments.engine.vllm_engine import VllmEngine

        return await VllmEngine.start(str(rig.shape.folder()), rig.engine_kwargs)
    from deployments.engine.paced import PacedEngine

    return await PacedEngine.start("plain", ENGINE)


# --- the removal --------------------------------------------------------------------------------------


async def _remove(
    options: argparse.Namespace,
    read: Callable[[list[int]], AsyncIterator[str]],
    is_whole: Callable[[list[int], list[str]], bool],
    one_less: Callable[[], Awaitable[Callable[[], Awaitable[bool]]]],
) -> RemovalResult:
    """Begin the streams, remove a replica when all have begun, and read them to their ends."""
    begun = [asyncio.Event() for _ in range(options.streams)]

    async def one(number: int) -> bool:
        prompt, pieces = random_prompt(PROMPT, number), []
        try:
            async for piece in read(prompt):
                pieces.append(piece)
                begun[number].set()
        except Exception as error:
            print(f"  stream {number} broke after {len(pieces)} steps: {error!r:.100}", flush=True)
            return False
        return is_whole(prompt, pieces)

    streams = [asyncio.create_task(one(number)) for number in range(options.streams)]
    for event in begun:
        await event.wait()
    started = time.monotonic()
    gone, gone_s = await one_less(), None
    while gone_s is None and not all(stream.done() for stream in streams):
        await asyncio.sleep(POLL_S)
        if await gone():
            gone_s = time.monotonic() - started
    whole = sum(await asyncio.gather(*streams))
    return RemovalResult(gone_s, whole, options.streams - whole)


if __name__ == "__main__":
    sys.exit(main())
