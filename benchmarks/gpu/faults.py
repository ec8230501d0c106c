"""The step that drains or kills a replica while streams run."""

import asyncio
import contextlib
import os
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.client.errors import ClientError
from benchmarks.chaos.server import Server, connect, read_answer
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.equality import TimedAnswer, draw_offers, is_whole
from benchmarks.gpu.record import FaultRow, ReplacementRow

POLL_S = 0.05
END_S = 30.0
"""The longest wait for an empty replica, in seconds."""


@dataclass(frozen=True, slots=True)
class Strike:
    """Drain or kill (SIGKILL) the replica with the most streams at a fifth of their answers.

    The streams are awaited to their ends, and then the return of the former number of replicas for `back_s` at most,
    and no longer than the step has time.
    """

    fault: Literal["drain", "kill"]
    streams: int = 16
    prompt: int = 400
    output: int = 400
    back_s: float = 0.0
    weight: float = 1.0
    kill: Callable[[int, int], None] = os.kill

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        offers = draw_offers(f"{bench.part}/{self.fault}", self.streams, self.prompt, self.output, seeded=False)
        answers = [TimedAnswer() for _ in offers]
        async with connect(f"http://127.0.0.1:{bench.mell_port}") as server:
            reading = [asyncio.create_task(read_answer(server, o, a)) for o, a in zip(offers, answers, strict=True)]
            while statistics.median(answer.chunks for answer in answers) < self.output / 5:
                if all(task.done() for task in reading):
                    raise RuntimeError(f"the streams ended before the fault: {answers[0].error or answers[0].broken}")
                await asyncio.sleep(POLL_S)
            before = await _running(server)
            victim = max(before, key=lambda replica: len(replica["requests"]))
            began = asyncio.get_running_loop().time()
            if self.fault == "drain":
                await server.drain(victim["id"])
            else:
                self.kill(victim["pids"][0], signal.SIGKILL)
            empty_s = await _until(lambda: _is_empty(server, victim["id"]), began, END_S)
            await asyncio.gather(*reading)
            labels = {offer.label for offer in offers}
            outcomes = Counter(
                f"{record['outcome']} by {record['path']}"
                for record in await server.migrations()
                if record["label"] in labels
            )
            broken = [
                str(answer.error or answer.broken or f"{answer.tokens} tokens, finish {answer.finish}")[:200]
                for offer, answer in zip(offers, answers, strict=True)
                if not is_whole(answer, offer)
            ]
            gap_s = round(max(answer.longest_gap_s for answer in answers), 3)
            held = len(victim["requests"])
            where = (bench.conditions, self.fault, len(offers), held, broken, gap_s)
            bench.record.add(FaultRow(*where, empty_s, dict(outcomes)))
            if self.back_s:
                passed = asyncio.get_running_loop().time() - began
                limit_s = min(self.back_s, passed + bench.time.left_s)
                back_s = await _until(lambda: _has_running(server, len(before)), began, limit_s)
                bench.record.add(ReplacementRow(bench.conditions, self.fault, back_s))


async def _running(server: Server) -> Sequence[dict[str, Any]]:
    return [replica for replica in (await server.state())["replicas"] if replica["state"] == "RUNNING"]


async def _is_empty(server: Server, replica: str) -> bool:
    return not any(found["requests"] for found in (await server.state())["replicas"] if found["id"] == replica)


async def _has_running(server: Server, count: int) -> bool:
    return len(await _running(server)) >= count


async def _until(condition: Callable[[], Any], began: float, limit_s: float) -> float | None:
    """Seconds from `began` until the condition holds; None if it does not within `limit_s`."""
    loop = asyncio.get_running_loop()
    while (passed := loop.time() - began) < limit_s:
        with contextlib.suppress(ClientError):
            if await condition():
                return round(passed, 2)
        await asyncio.sleep(POLL_S)
    return None
