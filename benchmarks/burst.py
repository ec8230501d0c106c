"""A burst beyond whole KV pools, live and simulated: `python -m benchmarks.burst [--rate 1.375] [--replicas 2]`.

The window `spikes` of `benchmarks.kunserve`, with its model, its costs and the same bytes for all contenders, under
real Serve: paced engines take the simulator's step times, exchange layers at the speed of the simulated links, and run
each other's steps by messages. Contenders are those of the simulator:

    no moves        requests stay where they are placed
    moves           load balancing
    always paired   the same, and pairs by hand before the first request
    pairs           the same, and pairs by the policy

Sizes of pools are set by hand: as on two GPUs, no replica gets memory of another one. Moved blocks hold tokens only, so
moves are faster than the simulated ones.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from app.client.api import ApiClient
from benchmarks.economics.predict import compute_costs
from benchmarks.kunserve.case import BLOCK, LOAD_BYTES_PER_S, MAIN, PairCase, PairContender
from benchmarks.kunserve.results import SHARES, PairOutcome, PairPlay
from benchmarks.kunserve.windows import WINDOW_S, PairWindow
from benchmarks.load import TimedStream, percentile
from benchmarks.servers import MODEL, paced
from benchmarks.sharing.live import PlayedModels, Row, play
from deployments.engine.pace import Pace

PORT = 8100
CONTENDERS = (PairContender.VLLM, PairContender.MOVES, PairContender.ALWAYS, PairContender.PAIRS)
LONGEST = 4000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BurstRow:
    """The figures of a contender, live or simulated: percentiles at `SHARES` of the times to first tokens, in seconds,
    and of the times per output token, in milliseconds.
    """

    contender: str
    where: str
    ttft: Sequence[float]
    tpot: Sequence[float]
    requests: int
    lost: int
    moves: int
    preemptions: int
    pairs: int

    def text(self) -> str:
        """A row of the table."""
        ttft = ", ".join(f"{each:.2f}" for each in self.ttft)
        tpot = ", ".join(f"{each:.0f}" for each in self.tpot)
        counts = "".join(f"  {each:>6}" for each in (self.lost, self.moves, self.preemptions, self.pairs))
        return f"{self.contender:<14}{self.where:<10}{ttft:>26}  {tpot:>22}{counts}"


HEAD = f"{'':<24}{'TTFT p50, 90, 99, 99.9, s':>26}  {'TPOT, ms':>22}    lost   moves  preem.   pairs"


def pace_of(case: PairCase) -> dict[str, Any]:
    """The engine settings of a case: the step times of its costs, whose steps of few tokens cost the same."""
    costs, memory = replace(case, compute=None).costs(), case.memory()
    assert costs.compute is not None
    assert costs.migration is not None
    (_, one), (few, last), (most, full) = (costs.compute.linear[index] for index in (0, -2, -1))
    token_s, link = (full - last) / (most - few), costs.migration.intra.bytes_per_s / _MIB
    setup = case.setup(WINDOW_S)
    hop = replace(case, contender=PairContender.PAIRS).setup(WINDOW_S).pairs
    assert hop is not None
    return {
        "num_gpu_blocks_override": setup.capacity // BLOCK,
        "block_size": BLOCK,
        "max_model_len": LONGEST,
        "max_num_seqs": 256,
        "max_num_batched_tokens": costs.compute.chunk_tokens,
        "decode_s": costs.compute.overhead_s + one,
        "decode_s_per_seq": costs.compute.sequence_s + token_s,
        "prefill_tokens_per_s": 1 / token_s,
        "context_s": costs.compute.context_s,
        "attention_s": costs.compute.attention_s,
        "overhead_s": costs.compute.overhead_s,
        "num_layers": memory.layers,
        "layer_mib": (memory.model.parameters - memory.outside) / memory.layers / _MIB,
        "block_mib": memory.model.block / _MIB,
        "hop_s": hop.hop.latency_s,
        "hop_s_per_token": hop.hop.token_s,
        "copy_mib_per_s": link,
        "load_mib_per_s": LOAD_BYTES_PER_S / _MIB,
    }


def settings_of(case: PairCase) -> dict[str, Any]:
    """The settings of the application."""
    pace = pace_of(case)
    held = pace["num_layers"] * pace["layer_mib"] + pace["num_gpu_blocks_override"] * pace["block_mib"]
    return {
        "engine_kwargs": pace,
        "memory": {"budget_mib": round(case.count * held) + 1, "declared": 3.0},
        "scheduler": {
            "policy": "worst_fit" if case.contender is PairContender.VLLM else "load_balance",
            "mode": "off" if case.contender is PairContender.VLLM else "act",
        },
        "pairing": {"mode": "act" if case.contender is PairContender.PAIRS else "off"},
    }


def simulated(case: PairCase) -> BurstRow:
    """The figures by the simulator."""
    found: PairOutcome = PairPlay(case).perform(lambda now: None)
    tpot = sorted(found.tpot)
    return BurstRow(
        case.contender,
        "simulated",
        [percentile(found.ttft, share) for share in SHARES],
        [1e3 * percentile(tpot, share) for share in SHARES],
        len(found.arrivals),
        len(found.arrivals) - len(found.firsts),
        found.moves,
        found.preemptions,
        len(found.groups),
    )


def measured(case: PairCase, rows: Sequence[Row]) -> BurstRow:
    """The figures of a run under real Serve."""
    with paced(PORT, (case.count, case.count), **settings_of(case)):
        return asyncio.run(_measured(case, rows))


async def _measured(case: PairCase, rows: Sequence[Row]) -> BurstRow:
    async with ApiClient(f"http://127.0.0.1:{PORT}") as server:
        replicas = sorted(each["id"] for each in (await server.state())["replicas"])
        for replica in replicas:
            await _order(server, f"/mell/replicas/{replica}/memory", {"blocks": case.capacity() // BLOCK})
        if case.contender is PairContender.ALWAYS:
            for lower, upper in zip(replicas[::2], replicas[1::2], strict=True):
                await _order(server, "/mell/pairs", {"lower": lower, "upper": upper})
            while not all(_is_paired(each) for each in (await server.state())["replicas"]):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        played = await play(case.contender, rows, lambda model: PORT, str)
        found = (await server.state())["replicas"]
        moved = sum(each["outcome"] == "committed" for each in await server.migrations())
        metrics = (await server.http.get("/metrics")).text
    formed = sum(float(line.split()[-1]) for line in metrics.splitlines() if _counts_pairs(line))
    return _live(case, played, moved, sum(each["preemptions"] for each in found), round(formed / 2))


def _live(case: PairCase, played: PlayedModels, moves: int, preemptions: int, pairs: int) -> BurstRow:
    ttft = [each.ttft for each in played.whole]
    tpot = [_tpot(each) for each in played.whole if len(each.arrivals) > 1]
    return BurstRow(
        case.contender,
        "live",
        [percentile(ttft, share) for share in SHARES],
        [1e3 * percentile(tpot, share) for share in SHARES],
        len(played.whole) + played.lost,
        played.lost,
        moves,
        preemptions,
        pairs,
    )


def _tpot(stream: TimedStream) -> float:
    return (stream.arrivals[-1] - stream.arrivals[0]) / (len(stream.arrivals) - 1)


def _is_paired(replica: Mapping[str, Any]) -> bool:
    pair = replica["memory"]["pair"]
    return pair is not None and (pair["state"], replica["memory"]["state"]) == ("paired", "settled")


def _counts_pairs(line: str) -> bool:
    return line.startswith("mell_pair_seconds_count") and 'phase="forming"' in line


async def _order(server: ApiClient, path: str, body: Mapping[str, Any]) -> None:
    """Order something. Raises RuntimeError if it is refused."""
    response = await server.http.post(path, json=body)
    if response.status_code != 202:
        raise RuntimeError(f"{path}: {response.text}")


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the window by every contender, live and simulated, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.burst", description=(__doc__ or "").split(":")[0])
    add = parser.add_argument
    add("--rate", type=float, default=1.375, help="requests per second and replica outside of the spikes")
    add("--replicas", type=int, default=2, help="an even number (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--contenders", nargs="+", choices=[*map(str, CONTENDERS)], default=[*map(str, CONTENDERS)])
    add("--seconds", type=float, default=WINDOW_S, help="only that much of the window, live (default: all)")
    add("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args(argv)
    base = PairCase(PairContender.PAIRS, PairWindow("spikes", given.rate), seed=given.seed, count=given.replicas)
    pace = Pace.model_validate(pace_of(base))
    base = replace(base, compute=compute_costs(pace))
    jobs = base.window.jobs(base.seed, base.capacity(), base.count)
    rows = [(job.arrival_s, int(job.prompt), int(job.output), MODEL) for job in jobs if job.arrival_s < given.seconds]
    print(
        f"{len(rows)} requests in {given.seconds:g} s for {base.count} replicas of {MAIN}, {base.capacity():,} tokens "
        f"of KV each, {base.gain():,} more in a pair\n{HEAD}"
    )
    found = []
    for contender in tqdm([PairContender(each) for each in given.contenders], unit="contender"):
        case = replace(base, contender=contender)
        for row in (simulated(case), measured(case, rows)):
            tqdm.write(row.text())
            found.append(row)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
