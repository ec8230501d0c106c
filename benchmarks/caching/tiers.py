"""The time to the first token of a prompt that is cached: in an engine's own memory, and in its tier of host memory.

    python -m benchmarks.caching.tiers [--tokens 1000] [--repeat 20] [--json FILE]

One engine of vLLM's CPU build with Mell's tiny model, in this process and without Ray. Each prompt is sent three times:
unknown, right again, and once other prompts have taken its blocks. Figures are medians; the exit status is 1 if an
answer differs from the first one of its prompt, or came from another tier.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from app.settings import CPU_ENGINE, CPU_ENV
from app.tinymodel import ensure_tiny_model
from deployments.engine.port import Engine
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import Prefilled
from migration.run.outputs import running

BLOCK = 32
OUTPUT = 8
DRAM_GIB = 0.25
WHERE = ("cold", "HBM", "DRAM")


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="the length of the prompts")
    parser.add_argument("--repeat", type=int, default=20, help="prompts, each of them new")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ |= CPU_ENV
    taken, wrong = asyncio.run(measure(options.tokens, options.repeat))
    medians = {where: statistics.median(seconds) for where, seconds in taken.items()}
    print(f"time to the first token of {options.tokens} tokens, medians of {options.repeat}")
    for where, median in medians.items():
        print(f"  {where:5} {median * 1e3:7.1f} ms  {median / medians['cold']:6.3f} of cold")
    print(f"  DRAM is {medians['DRAM'] / medians['HBM']:.2f} x HBM; {wrong} wrong answers or tiers")
    if options.json:
        options.json.write_text(json.dumps({"tokens": options.tokens, "ttft_s": taken, "wrong": wrong}, indent=1))
    sys.exit(1 if wrong else 0)


async def measure(tokens: int, repeat: int) -> tuple[dict[str, list[float]], int]:
    """The times to first tokens by the place of the KV, in seconds, and the number of wrong answers."""
    from deployments.engine.vllm_engine import VllmEngine

    blocks = 2 * (tokens // BLOCK + 2)
    sizes = {"num_gpu_blocks_override": blocks, "max_model_len": tokens + 2 * BLOCK, "max_num_batched_tokens": 2048}
    engine = await VllmEngine.start(str(ensure_tiny_model()), {**CPU_ENGINE, **sizes}, dram_gib=DRAM_GIB)
    taken: dict[str, list[float]] = {where: [] for where in WHERE}
    wrong = 0
    try:
        for number in range(-2, repeat):
            prompt = draw(tokens, number)
            answers = []
            for where in WHERE:
                if where == "DRAM":
                    for other in range(3):
                        await ask(engine, f"other-{number}-{other}", draw(tokens, f"{number} {other}"))
                # A store under way would be a part of the next step.
                await asyncio.sleep(0.05)
                seconds, answer, prefilled = await ask(engine, f"{where}-{number}", prompt)
                answers.append(answer)
                wrong += answer != answers[0] or not is_from(where, prefilled, tokens)
                if number >= 0:
                    taken[where].append(seconds)
    finally:
        engine.shutdown()
    return taken, wrong


async def ask(engine: Engine, name: str, prompt: Sequence[int]) -> tuple[float, tuple[int, ...], Prefilled | None]:
    """A request's time to its first token, its output, and the tokens of its prompt that were cached."""
    began, first, output, prefilled = time.perf_counter(), 0.0, list[int](), None
    async with running(engine, name, plain_spec(name, tuple(prompt), OUTPUT)) as steps:
        async for step in steps:
            first = first or time.perf_counter() - began
            output.extend(step.tokens)
            prefilled = prefilled or step.prefilled
    return first, tuple(output), prefilled


def is_from(where: str, prefilled: Prefilled | None, tokens: int) -> bool:
    """True if the full blocks of the prompt were where they should be."""
    whole = (tokens - 1) // BLOCK * BLOCK
    cached, loaded = (0, 0) if prefilled is None else prefilled[1:]
    return (cached, loaded) == {"cold": (0, 0), "HBM": (whole, 0), "DRAM": (whole, whole)}[where]


def draw(tokens: int, name: object) -> list[int]:
    """Token ids that no other name has."""
    chosen = random.Random(str(name))
    return [chosen.randrange(3, 480) for _ in range(tokens)]


if __name__ == "__main__":
    main()
