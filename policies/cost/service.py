"""Service levels, the speed of replicas, and the limits of a replica's work under a level.

How the limits follow from a level is in `policies.cost.limit`.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from policies.cost.lines import Line
from policies.cost.steps import PrefillChunk, StepCosts

TAIL = 0.01
"""The share of steps, and of prompts, that may take longer than the level."""

_MOST_TOKENS = 1 << 20
"""More tokens than any step computes."""


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The longest time to a first token, and between two tokens, in seconds, for 99 % of them; None: any time."""

    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None


def strictest(levels: Iterable[ServiceLevel]) -> ServiceLevel:
    """The level that keeps all of these."""
    each = tuple(levels)
    ttft_s, itl_s = [level.ttft_p99_s for level in each], [level.itl_p99_s for level in each]
    return ServiceLevel(_least(ttft_s), _least(itl_s))


def _least(times_s: Iterable[float | None]) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """Step times of a replica, their relative `error`, and the most tokens that a step computes (None: any number)."""

    costs: StepCosts
    error: float = 0.0
    chunk_tokens: int | None = None

    def prefill_s(self, tokens: int, cached: int = 0, batch: int = 0, context: float = 0.0) -> float:
        """F(p, c), on an idle replica or beside a decoding batch."""
        return self.costs.prefill_s(tokens, cached, self.chunk_tokens, batch, context)

    def first_token_s(
        self, load: Line, prompt: int, hbm: int, dram: int = 0, batch: int = 0, context: float = 0.0
    ) -> float:
        """Seconds from the beginning of a prompt's prefill to its first token, if a part of its KV is in a cache.

        Of the prompt's n tokens, the replica has m in its HBM and the d after them in its DRAM, from which `load` takes
        L(d) seconds. The time is the lower one of F(n - m, m) and L(d) + F(n - m - d, m + d).
        """
        computed_s = self.prefill_s(prompt - hbm, hbm, batch, context)
        if not dram:
            return computed_s
        loaded_s = load.seconds(dram) + self.prefill_s(prompt - hbm - dram, hbm + dram, batch, context)
        return min(computed_s, loaded_s)

    def added_s(self, tokens: int, cached: int, batch: int, context: float) -> float:
        """Seconds by which a prefill beside a decoding batch lengthens the batch's steps, in total."""
        if tokens <= 0:
            return 0.0
        steps = ceil(tokens / (self.chunk_tokens or tokens))
        return self.prefill_s(tokens, cached, batch, context) - steps * self.costs.step_s(batch, context)

    def wait_s(self, batch: int, context: float, queued: int) -> float:
        """Seconds of the prefills of `queued` tokens beside a batch with `context` tokens."""
        if not queued:
            return 0.0
        size = min(self.chunk_tokens or queued, queued)
        return ceil(queued / size) * self.costs.step_s(batch, context, (PrefillChunk(size, 0),))

    def chunk_within(self, seconds: float) -> int:
        """The most tokens that a step without other work prefills in that time, of those that a step computes; or 0."""
        return bisect_right(
            range(1, (self.chunk_tokens or _MOST_TOKENS) + 1),
            seconds,
            key=lambda tokens: self.costs.step_s(0, 0.0, (PrefillChunk(tokens, 0),)),
        )


@dataclass(frozen=True, slots=True)
class SpeedLimit:
    """The limits of one replica's work in an epoch.

    A step that only decodes takes `step_s` at most; an arriving prompt waits at most `wait_s` for the prefills before
    it. Both are in seconds, infinite without a limit. `interruption_s` is the time of prefills that is left out of
    `step_s`; with fewer than `least_replicas` replicas, steps and prefills together would exceed the level.
    `unreachable` are the reasons why no number of replicas meets a level at this traffic; that level then limits the
    rest as far as it can.
    """

    speed: ReplicaSpeed
    step_s: float = inf
    wait_s: float = inf
    interruption_s: float = 0.0
    least_replicas: int = 0
    unreachable: tuple[str, ...] = ()

    def room(self, batch: int, context: int) -> float:
        """The most tokens of one more request beside a batch with `context` tokens; below zero for no request."""
        costs = self.speed.costs
        left = self.step_s - costs.step_s(batch + 1, context)
        if left < 0:
            return -1.0
        return left / costs.context_s if costs.context_s else inf

    def excess(self, batch: int, context: int) -> int:
        """Tokens of the smallest request whose departure makes steps fast enough; 0 if they are.

        At least 1; more than any request has if one departure is not enough.
        """
        costs = self.speed.costs
        over = costs.step_s(batch, context) - self.step_s
        if over <= 0:
            return 0
        saved = costs.step_s(batch, 0.0) - costs.step_s(batch - 1, 0.0)
        return max(1, ceil((over - saved) / costs.context_s)) if costs.context_s else 1

    def share(self, batch: int, context: float) -> float:
        """The share of a replica's step time that a batch takes; 1 is full."""
        idle_s = self.speed.costs.step_s(0, 0.0)
        if self.step_s == inf:
            return 0.0
        taken_s = self.speed.costs.step_s(batch, context) - idle_s if batch else 0.0
        return taken_s / (self.step_s - idle_s) if self.step_s > idle_s else 1.0

    def is_in_time(self, batch: int, context: int, queued: int) -> bool:
        """True if a prompt that arrives behind `queued` tokens of prefills begins within `wait_s`, or next in line."""
        return not queued or self.wait_s == inf or self.speed.wait_s(batch, context, queued) <= self.wait_s


def unreachable(level: ServiceLevel, speed: ReplicaSpeed, prompt: int = 1) -> tuple[str, ...]:
    """The reasons why no replica meets the level, even for one request alone with a prompt of `prompt` tokens."""
    reasons = []
    prefill_s, step_s = speed.prefill_s(prompt), speed.costs.step_s(1, prompt)
    if level.ttft_p99_s is not None and prefill_s > level.ttft_p99_s:
        reasons.append(
            f"ttft_p99_s is {level.ttft_p99_s:g}, and a prompt of {prompt:,} tokens alone on a replica takes "
            f"{prefill_s:.3g} s to its first token"
        )
    if level.itl_p99_s is not None and step_s > level.itl_p99_s:
        reasons.append(
            f"itl_p99_ms is {1e3 * level.itl_p99_s:g}, and a step with one request of {prompt:,} tokens takes "
            f"{1e3 * step_s:.3g} ms"
        )
    return tuple(reasons)
