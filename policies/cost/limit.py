"""The limits of replicas' work that follow from a service level, and the replicas that dilute prefills.

    inter-token latency   99 % of the steps may take `itl_p99_s`. Prefills lengthen some steps; the time that they add
                          to all but 1 % of the steps (the interruption) is left out of the limit of decoding
    first token           a prompt waits for the prefills before it, and for its own, F(p, 0); both take `ttft_p99_s`
                          at most for 99 % of the prompts. The wait may take half of the level in any case: a few
                          prompts that take most of the level by themselves must not keep replicas empty

Both are divided by 1 + the error of the step times, so that an uncertain fit leaves a margin. Errors above `MOST_ERROR`
count as `MOST_ERROR`: emptier replicas are no cure for step times that vary for other reasons.

A chunk of a prompt lengthens one step of one replica. So n replicas that share the traffic evenly, and decode B / n
requests with T / n tokens of context each, take within t seconds

    (n * t - sum(added)) / step(B / n, T / n)

steps, where `added` are the times that the chunks of the prompts of these seconds add to a step each. The interruption
is the longest of them after as many as 1 % of the steps. It falls with every replica, since the chunks stay the same
and the steps become more: the least number of replicas whose step, with the interruption, is within the level is the
least that keeps the level. Prompts are placed where there is room, beside fewer requests than the mean, so both are
rather too large.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import ceil, inf

from policies.cost.service import TAIL, ReplicaSpeed, ServiceLevel, SpeedLimit, unreachable
from policies.cost.steps import StepCosts, prompt_chunks

MOST_ERROR = 0.5
"""The largest error that counts in the limits."""
MOST_REPLICAS = 1 << 14
"""More replicas than any pool has."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The work of all replicas of a pool.

    `prompts` are the tokens of the newest arrivals, `rate` the arrivals per second. `batch` requests, with `context`
    tokens in total, are decoded.
    """

    prompts: Sequence[int]
    rate: float
    batch: float = 0.0
    context: float = 0.0


class Interruptions:
    """The interruptions of a pool's traffic by its number of replicas; see the module."""

    def __init__(self, speed: ReplicaSpeed, traffic: Traffic) -> None:
        self._costs, self._traffic = speed.costs, traffic
        added_s = (_added_s(speed.costs, speed.chunk_tokens, prompt) for prompt in traffic.prompts)
        self._added_s = sorted(chain.from_iterable(added_s), reverse=True)
        self._prefills_s = sum(self._added_s)

    def seconds(self, replicas: int) -> float:
        """The time that prefills add to a step, and that they exceed in 1 % of all steps at most, in seconds."""
        if not self._traffic.rate:
            return 0.0
        decoding_s = max(0.0, replicas * len(self._traffic.prompts) / self._traffic.rate - self._prefills_s)
        allowed = int(TAIL * decoding_s / max(1e-6, self.step_s(replicas)))
        return max(0.0, self._added_s[allowed]) if allowed < len(self._added_s) else 0.0

    def step_s(self, replicas: int) -> float:
        """The time of a step of one of the replicas without prefills, in seconds. One that decodes has a request."""
        batch = max(1.0, self._traffic.batch / replicas)
        return self._costs.step_s(batch, self._traffic.context * batch / max(1.0, self._traffic.batch))

    def least_replicas(self, step_s: float) -> int | None:
        """The least number of replicas whose steps take at most `step_s` seconds, the interruption included.

        None if no number is enough.
        """

        def is_enough(replicas: int) -> bool:
            return self.step_s(replicas) + self.seconds(replicas) <= step_s

        if not is_enough(MOST_REPLICAS):
            return None
        return 1 + bisect_left(range(1, MOST_REPLICAS), True, key=is_enough)


@lru_cache(maxsize=4096)
def _added_s(costs: StepCosts, chunk_tokens: int | None, prompt: int) -> tuple[float, ...]:
    """The seconds that each chunk of a prompt adds to a step. Most prompts of an epoch are those of the one before."""
    idle_s = costs.step_s(0, 0.0)
    return tuple(costs.step_s(0, 0.0, (chunk,)) - idle_s for chunk in prompt_chunks(prompt, chunk_tokens))


def limit(
    level: ServiceLevel, speed: ReplicaSpeed, traffic: Traffic, replicas: int, most_replicas: float = inf
) -> SpeedLimit:
    """The limits for a service level, given the traffic of a pool with `replicas` replicas, `most_replicas` at most.

    With fewer replicas than the level takes, the limit of steps is that with the least number.
    """
    margin = 1.0 + min(speed.error, MOST_ERROR)
    prompts = traffic.prompts
    large = sorted(prompts)[ceil((1 - TAIL) * len(prompts)) - 1] if prompts else 1
    reasons = unreachable(level, speed, large)
    step_s = wait_s = inf
    interruption_s, least = 0.0, 0
    if level.itl_p99_s is not None:
        alone_s = speed.costs.step_s(1, large)
        step_s = max(level.itl_p99_s / margin, alone_s)
        interruptions = Interruptions(speed, traffic)
        least = interruptions.least_replicas(step_s) or 0
        is_allowed = least <= most_replicas
        interruption_s = interruptions.seconds(max(1, replicas, least if is_allowed else 1))
        if not is_allowed:
            reasons += (
                f"itl_p99_ms is {1e3 * level.itl_p99_s:g}, and prefills lengthen more than {TAIL:.0%} of the steps by "
                f"{1e3 * interruption_s:.3g} ms or more; {least:,} replicas would keep the level, but max_replicas is "
                f"{most_replicas:g}; {_smaller_chunks(level, speed, step_s, large)}",
            )
            least = 0
        elif least:
            step_s = max(step_s - interruption_s, alone_s)
    if level.ttft_p99_s is not None:
        wait_s = max(level.ttft_p99_s / margin - speed.prefill_s(large), level.ttft_p99_s / margin / 2)
    return SpeedLimit(speed, step_s, wait_s, interruption_s, least, reasons)


def _smaller_chunks(level: ServiceLevel, speed: ReplicaSpeed, step_s: float, prompt: int) -> str:
    """The number of tokens per step that leaves half of the step time to decoding, and its price for a long prompt."""
    idle_s = speed.costs.step_s(0, 0.0)
    chunk = speed.chunk_within((step_s + idle_s) / 2)
    if chunk < 2:
        return "no max_num_batched_tokens makes such steps short enough"
    cure = f"with max_num_batched_tokens: {chunk} they would take half of it"
    first_s = replace(speed, chunk_tokens=chunk).prefill_s(prompt)
    if level.ttft_p99_s is None or first_s <= level.ttft_p99_s:
        return cure
    return f"{cure}, but a prompt of {prompt:,} tokens {first_s:.3g} s to its first token"
