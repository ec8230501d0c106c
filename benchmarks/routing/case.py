"""Runs as values: systems, made-up sessions, and the conditions that all of them share."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from app.simulator.workload.sessions import SHAPES, SessionRequest, Texts, sessions
from deployments.engine.pace import Pace
from deployments.engine.tokens import expected
from policies.prefix.routing import Routing

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


def session_requests(workload: str, seed: int, rates: Mapping[str, float] = RATES) -> list[SessionRequest]:
    """The requests of a run, session by session."""
    chance, at_s = Random(f"{workload}-{seed}"), 0.0
    begins: list[float] = []
    while (at_s := at_s + chance.expovariate(rates[workload])) < BEGIN_S:
        begins.append(at_s)
    return list(sessions(SHAPES[workload], begins, seed))


def with_answers(requests: list[SessionRequest], workload: str, seed: int) -> list[RoutedRequest]:
    """The same requests with their prompts' tokens: later prompts have the answers that paced engines give."""
    texts, found = Texts(f"{workload}-{seed}"), []
    for each in requests:
        prompt = tuple(texts.tokens(each.prompt))
        texts.known[each.answer] = list(expected(prompt, each.output))
        found.append(RoutedRequest(each.session, each.at_s, each.think_s, prompt, each.output))
    return found
