"""A copied prefix beside the same one computed: the time of a copy between two replicas, and of first tokens.

    python -m benchmarks.caching.prefix_copies [--prompts 512 2048 3500] [--repeat 8] [--json FILE]

For each sample, a fresh prompt is answered by one replica, which computes it. Its blocks are copied to the other one
(`POST /mell/cache/copy`), deleted where they were, and the prompt is answered again, by the replica that got the copy.
Answers have one token, so that their times are those of first tokens, as a client gets them. Nothing else runs.

Figures are medians with ranges, and the ratios are those of medians. The exit status is 1 if a copy failed, or an
answer had other cached tokens than the copied ones, or another token.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.client.api import ApiClient
from benchmarks.load import random_prompt, spread
from benchmarks.servers import MODEL, Rig, add_rig_options, mell

PORT = 8100
EPOCHS_S = 2.0
"""The time after which the scheduler's tree has the changes of caches."""


@dataclass(frozen=True, slots=True)
class CopiedPrompt:
    """One sample: `cold_s`, `copied_s` and `again_s` are times to first tokens of a prompt that was computed, copied,
    and cached where it is. The copy of `size` bytes took `copy_s` from the order to its end. `whole` if all was right.
    """

    cold_s: float
    copy_s: float
    copied_s: float
    again_s: float
    size: int
    whole: bool


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 3500])
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--json", type=Path)
    add_rig_options(parser)
    options = parser.parse_args()
    usage = {"frontend_kwargs": {"enable_prompt_tokens_details": True}}
    with mell(PORT, 2, Rig.of(options), ingress=usage):
        samples = asyncio.run(_measure(options.prompts, options.repeat))
    _print(samples)
    if options.json:
        raw = {tokens: [asdict(sample) for sample in found] for tokens, found in samples.items()}
        options.json.write_text(json.dumps(raw, indent=1))
    sys.exit(not all(sample.whole for found in samples.values() for sample in found))


async def _measure(prompts: Sequence[int], repeat: int) -> dict[int, list[CopiedPrompt]]:
    """Samples of all lengths in turns, after one of each that is not measured."""
    samples: dict[int, list[CopiedPrompt]] = {tokens: [] for tokens in prompts}
    async with ApiClient(f"http://127.0.0.1:{PORT}", timeout_s=60.0) as client:
        for tokens in prompts:
            await _sample(client, tokens, f"warm/{tokens}")
        for i, tokens in tqdm([(i, tokens) for i in range(repeat) for tokens in prompts], unit="copy"):
            samples[tokens].append(await _sample(client, tokens, f"{tokens}/{i}"))
    return samples


async def _sample(client: ApiClient, tokens: int, seed: str) -> CopiedPrompt:
    prompt = random_prompt(tokens, seed)
    cold_s, computed = await _answer(client, prompt)
    await asyncio.sleep(EPOCHS_S)
    found = (await client.match({"prompt": prompt}))["replicas"]
    ordered = sorted(found, key=lambda replica: int(replica["tokens"]["hbm"]))
    target, donor = str(ordered[0]["id"]), str(ordered[-1]["id"])
    record = await client.copy({"prompt": prompt, "from": donor, "to": target})
    await client.drop({"prompt": prompt, "replica": donor})
    await asyncio.sleep(EPOCHS_S)
    copied_s, copied = await _answer(client, prompt)
    again_s, _ = await _answer(client, prompt)
    block = int((await client.match({"prompt": prompt}))["block_size"])
    usable = (tokens - 1) // block * block
    cached = (copied["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
    same = copied["choices"][0]["text"] == computed["choices"][0]["text"]
    whole = record["present"] == 0 and record["held"] == tokens // block and cached == usable and same
    return CopiedPrompt(cold_s, float(record["duration_s"]), copied_s, again_s, int(record["bytes"]), whole)


async def _answer(client: ApiClient, prompt: list[int]) -> tuple[float, dict[str, Any]]:
    """The seconds of an answer of one token, and the answer."""
    began = time.perf_counter()
    body = await client.complete({"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0})
    return time.perf_counter() - began, body


def _print(samples: dict[int, list[CopiedPrompt]]) -> None:
    print("milliseconds, median [min, max]; first tokens as clients get them")
    print(
        f"{'prompt':>6}{'n':>4}{'MiB':>6}{'computed':>24}{'copy':>22}{'copied':>22}{'cached':>22}"
        f"{'copy/computed':>15}{'copy+first/computed':>21}"
    )
    for tokens, found in samples.items():
        columns = {name: [getattr(sample, name) * 1e3 for sample in found] for name in _TIMES}
        cold, copy, copied = (statistics.median(columns[name]) for name in _TIMES[:3])
        print(
            f"{tokens:6}{len(found):4}{found[0].size / 2**20:6.1f}{spread(columns['cold_s']):>24}"
            f"{spread(columns['copy_s']):>22}{spread(columns['copied_s']):>22}{spread(columns['again_s']):>22}"
            f"{copy / cold:15.3f}{(copy + copied) / cold:21.3f}"
        )


_TIMES = ("cold_s", "copy_s", "copied_s", "again_s")

if __name__ == "__main__":
    main()
