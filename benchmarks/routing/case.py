"""Runs as values: systems, workloads, and the conditions that all of them share."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from deployments.engine.pace import Pace
from deployments.engine.tokens import expected
from policies.prefix.routing import Routing
from simulator.errors import BadInput
from simulator.workload.sessions import SHAPES, Passage, SessionRequest, Texts, sessions
from simulator.workload.workload import Recorded, read_trace

REPLICAS = 4
PACE = Pace(
    num_gpu_blocks_override=512,
    block_size=16,
    max_model_len=4096,
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    decode_s=0.02,
    decode_s_per_seq=1 / 4000,
    prefill_tokens_per_s=2500.0,
)
"""Engines with room for 8,192 tokens."""
BEGIN_S = 40.0
"""The time in which sessions begin."""
RATES: Mapping[str, float] = {"sharegpt_like": 2.0, "loogle_like": 1.5, "react_like": 1.2}
"""Sessions per second."""
MOONCAKE = "mooncake"
"""Part of Mooncake's conversation trace, as a workload."""
WORKLOADS = (*RATES, MOONCAKE)
_FILE = "mooncake_conversation.jsonl.gz"
_HASHED_TOKENS = 512
"""Tokens of a block that the trace names."""
_SCALE = 16
_SPEED = 3.0
_PART_S = 240.0
_FIRST_S = 600.0
"""The trace's lengths are divided by `_SCALE`. A run has `_PART_S` seconds of it, `_SPEED` times as fast; the runs of
different seeds have parts that lie `_FIRST_S` apart, the first of them from there on.
"""
_LONGEST = 3000
ROOMY = PACE.model_copy(update={"num_gpu_blocks_override": 16384})
"""Engines for that trace, with room for 262,144 tokens: all four for as much of it as 17 million tokens."""
POLICY = "worst_fit"
"""The policy of Mell: what content leaves open goes to the replica with the most room."""


class System(StrEnum):
    """A way of routing: Mell's routings, and routers of Ray in a plain Serve application."""

    TREE = "tree"
    SESSION = "session"
    LEAST_LOAD = "least_load"
    RAY_PREFIX = "ray_prefix"
    """Ray's PrefixCacheAffinityRouter, with its defaults."""
    RAY_PREFIX_BALANCED = "ray_prefix_balanced"
    """The same, by the power of two if queues differ by more than `IMBALANCE` requests."""
    RAY_POW2 = "ray_pow2"
    """Serve's default: the less busy of two replicas."""

    @property
    def routing(self) -> Routing | None:
        """Mell's routing; None for a system of Ray's."""
        return Routing(self.value) if self.value in set(Routing) else None


IMBALANCE = 3
PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
"""The router behind `ray.serve.llm.request_router`, whose own module needs the packages of ray[llm]."""
ROUTERS: Mapping[System, Mapping[str, Any]] = {
    System.RAY_PREFIX: {"request_router_class": PREFIX_ROUTER},
    System.RAY_PREFIX_BALANCED: {
        "request_router_class": PREFIX_ROUTER,
        "request_router_kwargs": {"imbalanced_threshold": IMBALANCE},
    },
    System.RAY_POW2: {},
}
"""Settings of Serve's `RequestRouterConfig`."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request of a session, with the tokens of its prompt. It is sent `think_s` seconds after the answer before."""

    session: str
    at_s: float
    think_s: float
    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class RoutingCase:
    """A workload, drawn from a seed, and the engines that serve it."""

    workload: str
    seed: int
    requests: tuple[SessionRequest, ...]
    pace: Pace = PACE


def case(workload: str, seed: int, traces: Path | None = None) -> RoutingCase:
    """A workload. Raises `BadInput` for a trace that cannot be read in `traces`, and a seed beyond its end."""
    if workload != MOONCAKE:
        return RoutingCase(workload, seed, tuple(session_requests(workload, seed)))
    if traces is None:
        raise BadInput(f"{MOONCAKE} needs --traces, the folder of {_FILE}.")
    requests = tuple(part_of_trace(read_trace(traces / _FILE).rows, seed))
    if not requests:
        raise BadInput(f"Seed {seed} is beyond the end of {_FILE}.")
    return RoutingCase(workload, seed, requests, ROOMY)


def part_of_trace(rows: Iterable[Recorded], seed: int) -> Iterator[SessionRequest]:
    """The requests of one part of a trace, each a session of its own. Equal names of blocks are equal texts."""
    begins_s = _FIRST_S * (1 + seed)
    there = (row for row in rows if begins_s <= row.at_s < begins_s + _PART_S)
    size = _HASHED_TOKENS // _SCALE
    for number, row in enumerate(there):
        left, prompt = min(max(1, round(row.prompt / _SCALE)), _LONGEST), []
        for name in row.names:
            if left > 0:
                prompt.append(Passage(f"block-{name}", min(size, left)))
                left -= size
        output = max(1, round(row.output / _SCALE))
        at_s = (row.at_s - begins_s) / _SPEED
        yield SessionRequest(f"s{number}", at_s, 0.0, tuple(prompt), output, f"answer-{number}")


def session_requests(workload: str, seed: int, rates: Mapping[str, float] = RATES) -> list[SessionRequest]:
    """The requests of a run, session by session."""
    chance, at_s = Random(f"{workload}-{seed}"), 0.0
    begins: list[float] = []
    while (at_s := at_s + chance.expovariate(rates[workload])) < BEGIN_S:
        begins.append(at_s)
    return list(sessions(SHAPES[workload], begins, seed))


def with_answers(requests: Iterable[SessionRequest], workload: str, seed: int) -> list[RoutedRequest]:
    """The same requests with their prompts' tokens: later prompts have the answers that paced engines give."""
    texts, found = Texts(f"{workload}-{seed}"), []
    for each in requests:
        prompt = tuple(texts.tokens(each.prompt))
        texts.known[each.answer] = list(expected(prompt, each.output))
        found.append(RoutedRequest(each.session, each.at_s, each.think_s, prompt, each.output))
    return found
