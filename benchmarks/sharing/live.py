"""Three models in the memory of two, live: `python -m benchmarks.sharing.live [--minutes 5] [--rate 0.4]`.

Zipf arrivals (`SharingWorkload`) for three models of 340 MB on the CPU, served in turn by

    Mell            memory by demand within a budget; models without requests may sleep
    static shares   the same application without a budget: what Mell's pools had together, in three equal pools
    by popularity   the same, the pools in proportion to the rates of the models, which hindsight knows
    vLLM            three servers of vLLM's own, with the equal pools

The pools of the others are what Mell's budget leaves beside all parameters and the processes as they have grown; vLLM's
own servers are taken to need as much. All serve the same requests. A request is lost if its answer is an error, or
incomplete.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from app.client.api import ApiClient
from benchmarks.load import TimedStream, percentile, random_prompt, stream
from benchmarks.servers import MODEL, Rig, bare_vllm, mell
from benchmarks.sharing.workloads import SharingWorkload, model_name, zipf

PORT = 8100
MODELS = 3
LONGEST = 1024
"""The longest context of a request, in tokens."""
BLOCK_TOKENS = 32
LEAST = LONGEST // BLOCK_TOKENS + 1
"""The blocks of the smallest pool; an engine uses one for itself."""
RIG = Rig(model="middle", extra={"max_model_len": LONGEST, "max_num_seqs": 64})
BLOCK_BYTES = BLOCK_TOKENS * RIG.kv_bytes

Row = tuple[float, int, int, str]


@dataclass(frozen=True, slots=True)
class PlayedModels:
    """The streams of one contender that came to their end, and the number of those that did not, with a reason."""

    name: str
    whole: Sequence[TimedStream]
    lost: int
    reason: str = ""

    def row(self) -> str:
        """A row of the table."""
        ttfts = [each.ttft for each in self.whole]
        gaps = [gap for each in self.whole for gap in each.gaps]
        times = "  ".join(f"{percentile(ttfts, q):>7.2f} s" for q in (0.5, 0.9, 0.99)) if ttfts else ""
        itl = f"{1e3 * percentile(gaps, 0.5):>5.0f}, {1e3 * percentile(gaps, 0.99):>6.0f} ms" if gaps else ""
        return f"{self.name:<28}  {len(self.whole):>8}  {self.lost:>4}  {times}  {itl}  {self.reason}"


HEAD = f"{'':<28}  {'answered':>8}  {'lost':>4}  {'TTFT p50':>9}  {'p90':>9}  {'p99':>9}  {'ITL p50, p99':>16}"


async def play(
    name: str, rows: Sequence[Row], port_of: Callable[[str], int], model_of: Callable[[str], str]
) -> PlayedModels:
    """Send each request at its time, and read all answers to their ends."""
    bar, whole, lost = tqdm(total=len(rows), desc=name, unit="request", leave=False), list[TimedStream](), list[str]()
    began = time.perf_counter()

    async def ask(index: int, row: Row) -> None:
        at, prompt, output, model = row
        await asyncio.sleep(began + at - time.perf_counter())
        try:
            tokens = random_prompt(prompt, f"{model}/{index}")
            whole.append(await stream(port_of(model), model_of(model), tokens, output, f"{model}-{index}"))
        except (RuntimeError, OSError) as error:
            lost.append(str(error))
        bar.update()

    await asyncio.gather(*(ask(index, row) for index, row in enumerate(rows)))
    bar.close()
    return PlayedModels(name, whole, len(lost), lost[0][:200] if lost else "")


def shares(blocks: int, rates: Sequence[float]) -> list[int]:
    """Blocks divided in proportion to rates; nobody gets less than the smallest pool."""
    left, found = blocks - LEAST * len(rates), []
    for rate in rates:
        found.append(LEAST + int(left * rate / sum(rates)))
    return found


def model_settings(name: str, blocks: int | None = None, least: int = 1) -> dict[str, Any]:
    """The settings of a model whose pool has `blocks` blocks at its start, and that has `least` replicas or more."""
    engine = dict(RIG.extra) if blocks is None else {**RIG.extra, "num_gpu_blocks_override": blocks}
    return {
        "model_loading_config": {"model_id": name, "model_source": str(RIG.shape.folder())},
        "engine_kwargs": engine,
        "deployment_config": {"autoscaling_config": {"min_replicas": least, "max_replicas": 1}},
    }


def budget_settings(budget_mib: int, linger_s: float) -> dict[str, Any]:
    """The settings of Mell with a budget, in which models without requests sleep."""
    return {
        "memory": {"budget_mib": budget_mib, "declared": 16.0},
        "scheduler": {"policy": "pack", "mode": "act", "epoch_s": 0.25, "linger_s": linger_s},
        "ingress": {"no_replica_timeout_s": 60.0},
    }


@contextlib.contextmanager
def three_vllms(names: Sequence[str], pools: Sequence[int]) -> Iterator[Mapping[str, int]]:
    """vLLM's own servers, one for each model; their ports."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for number, (name, blocks) in enumerate(zip(names, pools, strict=True)):
            rig = replace(RIG, extra={**RIG.extra, "num_gpu_blocks_override": blocks})
            ports[name] = stack.enter_context(bare_vllm(PORT + 1 + number, rig))
        yield ports


async def parameters_mib(names: Sequence[str]) -> int:
    """The parameters of all models, each of which answers a request first: it may sleep already."""
    found: dict[str, int] = {}
    async with ApiClient(f"http://127.0.0.1:{PORT}") as server:
        for name in names:
            await stream(PORT, name, random_prompt(8, name), 2)
            for each in (await server.state())["replicas"]:
                found[each["id"]] = max(found.get(each["id"], 0), each["memory"]["parameters_mib"])
    return sum(found.values())


async def rest_mib() -> int:
    """The processes of all models, as they have grown by now."""
    async with ApiClient(f"http://127.0.0.1:{PORT}") as server:
        return sum(each["memory"]["rest_mib"] for each in (await server.state())["replicas"])


def main() -> None:
    """Serve the requests by every contender in turn, and print each one's times."""
    parser = argparse.ArgumentParser(description="Three models in the memory of two: Mell, static shares, vLLM.")
    parser.add_argument("--minutes", type=float, default=5.0, help="of arrivals (default: %(default)g)")
    parser.add_argument("--rate", type=float, default=0.4, help="requests per second in all (default: %(default)g)")
    parser.add_argument("--budget-mib", type=int, default=5800, help="of all three (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--linger-s", type=float, default=5.0, help="a model without requests sleeps after that time")
    given = parser.parse_args()
    rates = zipf(given.rate, MODELS)
    workload = SharingWorkload("zipf-3", rates, 300, 150, 60.0 * given.minutes, longest=LONGEST)
    rows = workload.rows(given.seed)
    names = [model_name(number) for number in range(MODELS)]

    def serve(name: str, port_of: Callable[[str], int], model_of: Callable[[str], str] = str) -> None:
        print(asyncio.run(play(name, rows, port_of, model_of)).row(), flush=True)

    budgeted = budget_settings(given.budget_mib, given.linger_s)
    print(
        f"{len(rows)} requests in {given.minutes:g} minutes for {MODELS} models by Zipf's law; {RIG}\n{HEAD}",
        flush=True,
    )
    settings = [model_settings(name, 4 * LEAST, least=0) for name in names]
    with mell(PORT, 1, RIG, models=settings, **budgeted):
        parameters = asyncio.run(parameters_mib(names))
        serve("Mell, memory by demand", lambda model: PORT)
        rest = asyncio.run(rest_mib())
    blocks = (given.budget_mib - parameters - rest << 20) // BLOCK_BYTES
    print(
        f"{given.budget_mib} MiB: {parameters} of parameters, {rest} of processes, and for KV {blocks} blocks of "
        f"{BLOCK_TOKENS} tokens",
        flush=True,
    )
    equal = shares(max(blocks, MODELS * LEAST), [1.0] * MODELS)
    by_rate = shares(max(blocks, MODELS * LEAST), rates)
    for name, pools in (("static shares", equal), ("static, by popularity", by_rate)):
        settings = [model_settings(model, own) for model, own in zip(names, pools, strict=True)]
        with mell(PORT, 1, RIG, models=settings):
            serve(f"{name}: {'+'.join(map(str, pools))}", lambda model: PORT)
    with three_vllms(names, equal) as ports:
        serve("vLLM, three servers", ports.__getitem__, lambda model: MODEL)


if __name__ == "__main__":
    main()
