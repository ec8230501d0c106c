"""First and second tokens where prefill and decoding are on different replicas, beside replicas that do both.

    python -m benchmarks.memserve.handover [--contexts 512 1024 2048 3500] [--repeat 8] [--chunk 256] [--paced]
                                  [--vllm] [--device cuda] [--json FILE]

Streams come one after the other, with nothing else running, to two replicas: first with `disaggregation.mode: static`,
one of them for prefills, then with both for everything. A step computes at most `--chunk` tokens of a prompt, so that a
prefill takes several steps. With disaggregation, a request is ordered to move while it prefills; its blocks follow as
they fill, and it goes on at the other replica behind its first token. The second token's time is the gap at the client
between the first two tokens, in median gaps of the same stream. Streams that did not follow their prefill are counted
and left out of the figures; the exit status is 1 if none of a context did.

`--paced`: engines that keep the pace of a GPU and take no processor time of each other. `--vllm`: vLLM's own
disaggregation instead, two of its servers with the NIXL connector (`benchmarks.memserve.nixl_pair`), beside the same
servers without a hand-over. There the first token comes behind the hand-over, and it is an error if the second server
has not read the blocks of all prompts by the end.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.instruments.admin import Admin
from benchmarks.load import TimedStream, random_prompt, spread, stream
from benchmarks.memserve.nixl_pair import handed_over, nixl_pair, read_bytes
from benchmarks.servers import MODEL, PACED, Rig, add_rig_options, mell, paced

PORT = 8100
OUTPUT = 60
APART, TOGETHER = "apart", "together"
VLLM_APART, VLLM_TOGETHER = "vllm apart", "vllm together"
"""The systems, without and with vLLM's own disaggregation in Mell's place."""
_PREFILL_RATE = 4000.0
"""Of paced engines, in tokens per second."""
_RECORD_S = 5.0
_TRIES = 25
_BLOCK = 128
"""The tokens of vLLM's largest usual block: it transfers whole ones."""

Send = Callable[[str, list[int]], Awaitable[tuple[TimedStream, Mapping[str, Any] | None]]]
"""Sends a prompt by a label; its answer, and the record of its hand-over."""


@dataclass(frozen=True, slots=True)
class HandoverSample:
    """A stream: its times in seconds at the client, and the record of Mell's hand-over, None for other systems."""

    system: str
    context: int
    ttft_s: float
    second_s: float
    gap_s: float
    record: dict[str, Any] | None

    @property
    def second_gaps(self) -> float:
        """The time of the second token, in median gaps of the same stream."""
        return self.second_s / self.gap_s

    @property
    def counts(self) -> bool:
        """True unless the request was to follow its prefill to another replica, and did not."""
        if self.system != APART:
            return True
        record = self.record or {}
        return record.get("outcome") == "committed" and record["path"] == "kv" and record["waited_s"] > 0


def main() -> None:
    """Parse the options, measure, print."""
    options = _options()
    samples: list[HandoverSample] = []
    if options.vllm:
        with nixl_pair(PORT, Rig.of(options), ("--max-num-batched-tokens", str(options.chunk))):
            samples += asyncio.run(_measure_vllm(options))
    else:
        for system in (APART, TOGETHER):
            with _server(system, options):
                samples += asyncio.run(_measure(system, options))
    if options.json:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1))
    what = "paced engines" if options.paced else f"{'vLLM alone, ' * options.vllm}{Rig.of(options)}"
    print(f"\n{what}; at most {options.chunk} tokens of a prompt in a step: median [min, max]")
    systems = (VLLM_APART, VLLM_TOGETHER) if options.vllm else (APART, TOGETHER)
    lines = list(table(samples, options.contexts, *systems))
    print("\n".join(lines))
    sys.exit(any(not _of(samples, systems[0], context) for context in options.contexts))


def table(
    samples: Sequence[HandoverSample], contexts: Sequence[int], apart: str = APART, together: str = TOGETHER
) -> Iterator[str]:
    """A line for every context, of streams with a hand-over and without."""
    yield (
        f"{'context':>7}{'followed':>10}{'first token, ms':>26}{'together':>24}{'ratio':>7}"
        f"{'second token, ms':>26}{'median gaps':>20}{'together':>20}"
    )
    for context in contexts:
        asked = [s for s in samples if (s.system, s.context) == (apart, context)]
        followed, others = _of(samples, apart, context), _of(samples, together, context)
        start = f"{context:7}{f'{len(followed)}/{len(asked)}':>10}"
        if not followed or not others:
            yield start
            continue
        first, first_together = ([s.ttft_s * 1e3 for s in each] for each in (followed, others))
        ratio = statistics.median(first) / statistics.median(first_together)
        yield (
            f"{start}{spread(first):>26}{spread(first_together):>24}{ratio:7.2f}"
            f"{spread([s.second_s * 1e3 for s in followed]):>26}{spread([s.second_gaps for s in followed]):>20}"
            f"{spread([s.second_gaps for s in others]):>20}"
        )


def _of(samples: Sequence[HandoverSample], system: str, context: int) -> list[HandoverSample]:
    return [s for s in samples if (s.system, s.context) == (system, context) and s.counts]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 3500])
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=256, help="most tokens of a prompt in a step")
    engines = parser.add_mutually_exclusive_group()
    engines.add_argument("--paced", action="store_true", help="engines that keep the pace of a GPU")
    engines.add_argument("--vllm", action="store_true", help="vLLM's own disaggregation; needs the package nixl")
    parser.add_argument("--json", type=Path)
    add_rig_options(parser)
    options = parser.parse_args()
    longest = PACED["max_model_len"] if options.paced else Rig.of(options).context
    if max(options.contexts) + OUTPUT > longest:
        parser.error(f"a context and {OUTPUT} tokens of output together exceed {longest} tokens")
    return options


@contextmanager
def _server(system: str, options: argparse.Namespace) -> Iterator[int]:
    mode = {"mode": "static" if system == APART else "off"}
    settings: dict[str, Any] = {"disaggregation": mode, "scheduler": {"policy": "best_fit", "mode": "act"}}
    if options.paced:
        pace = {"max_num_batched_tokens": options.chunk, "prefill_tokens_per_s": _PREFILL_RATE}
        with paced(PORT, (2, 2), **settings, engine_kwargs=PACED | pace) as port:
            yield port
    else:
        limit = {"max_num_batched_tokens": options.chunk}
        with mell(PORT, 2, Rig.of(options), **settings, engine_kwargs=limit) as port:
            yield port


async def _measure(system: str, options: argparse.Namespace) -> list[HandoverSample]:
    """Streams of one system."""
    async with Admin(PORT) as admin:

        async def send(label: str, prompt: list[int]) -> tuple[TimedStream, Mapping[str, Any] | None]:
            read = await stream(PORT, MODEL, prompt, OUTPUT, label)
            return read, await admin.record_of(label, _RECORD_S) if system == APART else None

        return await _in_turns(options, {system: send})


async def _measure_vllm(options: argparse.Namespace) -> list[HandoverSample]:
    """Streams of vLLM's two servers, by both and by the first alone. Raises RuntimeError if blocks were not read."""
    sent = list[int]()
    async with httpx.AsyncClient(timeout=60.0) as client:

        async def apart(label: str, prompt: list[int]) -> tuple[TimedStream, Mapping[str, Any] | None]:
            sent.append(len(prompt))
            return await handed_over(client, PORT, prompt, OUTPUT, label), None

        async def together(label: str, prompt: list[int]) -> tuple[TimedStream, Mapping[str, Any] | None]:
            return await stream(PORT, MODEL, prompt, OUTPUT, label), None

        samples = await _in_turns(options, {VLLM_APART: apart, VLLM_TOGETHER: together})
        read = await read_bytes(client, PORT) / Rig.of(options).kv_bytes
    if read < sum(sent) - _BLOCK * len(sent):
        raise RuntimeError(f"the second server has read {read:.0f} of {sum(sent)} prompt tokens from the first")
    return samples


async def _in_turns(options: argparse.Namespace, sends: Mapping[str, Send]) -> list[HandoverSample]:
    """Streams of every context by every system, in turns; the first round is for the engines to warm up."""
    samples = []
    turns = [
        (i, context, system) for i in range(options.repeat + 1) for context in options.contexts for system in sends
    ]
    for i, context, system in tqdm(turns, desc=" and ".join(sends), unit="stream"):
        sample = await _sample(system, context, f"{system}/{context}/{i}", sends[system])
        samples += [sample] if i else []
    return samples


async def _sample(system: str, context: int, name: str, send: Send) -> HandoverSample:
    """A stream with one token in every chunk. Where a chunk has several, another stream takes its place.

    Raises RuntimeError if several in turn have such chunks: the gap behind the first token is not known then.
    """
    for number in range(_TRIES):
        label = f"{name}/{number}"
        read, record = await send(label, random_prompt(context, label))
        if len(read.arrivals) == OUTPUT:
            gap_s = statistics.median(read.gaps)
            return HandoverSample(system, context, read.ttft, read.gaps[0], gap_s, dict(record) if record else None)
    raise RuntimeError(f"{len(read.arrivals)} chunks for {OUTPUT} tokens, in {_TRIES} streams")


if __name__ == "__main__":
    main()
