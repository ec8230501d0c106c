"""The time of a job, from its arrival to its last token, by the number of replicas that prefill alone.

Of a pool, k replicas are for prefills and m for decoding. A share x of the prompts is prefilled on the k, and the rest
beside the decoding requests of the m, whose steps it lengthens. With F of `steps`, and B requests with T tokens of
context on each of the m, a job takes in the mean

    x * (W(k) + F(p, c) + pause)              its first token and its hand-over, or
    (1 - x) * (W(1) + F(p, c) beside B, T)    its first token where it decodes
    + answer * step(B, T) / (1 - u)           u: the share of the time by which prefills lengthen the steps of the m

seconds. W are the waits for earlier prefills, those of a queue with k servers (Sakasegawa's approximation) or with one.
B follows from the arrivals by Little's law, so it depends on the time of a step, and that on B: the least solution
counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import NamedTuple

from policies.cost.service import TAIL, ReplicaSpeed, ServiceLevel

SHARES = (0.25, 0.5, 0.75, 1.0)
"""The shares of prompts that are prefilled apart, of which the best counts."""
MOST_BUSY = 0.95
"""The largest share of its time in which a replica prefills."""
EXCESS_WEIGHT = 10.0
"""The weight of a time that exceeds its target: twice the target adds this multiple of the job's time."""
_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class JobLoad:
    """The mean job of a pool, and the `rate` of arrivals per second.

    It computes `prompt` tokens after `cached` ones; `variation` is the squared coefficient of variation of the times of
    these prefills, and 1 % of them compute more than `longest` tokens. The `answer` has that many tokens, and a
    decoding request `context` tokens. A hand-over takes `pause_s` seconds from the first token to the second one.
    """

    rate: float
    prompt: int
    cached: int
    variation: float
    longest: int
    answer: float
    context: float
    pause_s: float = 0.0


class JobTime(NamedTuple):
    """The mean time of a job, and the times to its first token and between two tokens that 1 % exceed, in seconds.

    Infinite where replicas do not keep up with the arrivals.
    """

    job_s: float
    ttft_p99_s: float
    itl_p99_s: float

    @property
    def is_overload(self) -> bool:
        """True if the replicas do not keep up with the arrivals."""
        return self.job_s == inf

    def cost_s(self, level: ServiceLevel) -> float:
        """The time of a job, which times beyond the targets of a level multiply."""
        targets = (self.ttft_p99_s, level.ttft_p99_s), (self.itl_p99_s, level.itl_p99_s)
        excess = sum(max(0.0, time_s / target_s - 1) for time_s, target_s in targets if target_s is not None)
        return self.job_s * (1 + EXCESS_WEIGHT * excess)


def job_time(speed: ReplicaSpeed, load: JobLoad, prefills: int, decoding: float, level: ServiceLevel) -> JobTime:
    """The time of a job with that many replicas for prefills, and `decoding` ones that share the other work evenly."""
    shares: Iterable[float] = SHARES if prefills else (0.0,)
    times = (_job_time(speed, load, prefills, decoding, share) for share in shares)
    return min(times, key=lambda time: time.cost_s(level))


def decode_s(speed: ReplicaSpeed, load: JobLoad, decoding: float, batch: float, share: float) -> float:
    """Seconds between two tokens of a request in a batch, where a `share` of the prompts is prefilled apart."""
    size = max(1.0, batch)
    step_s = speed.costs.step_s(size, size * load.context)
    added_s = speed.added_s(load.prompt, load.cached, round(size), size * load.context)
    busy = min(MOST_BUSY, (1 - share) * load.rate / decoding * added_s)
    return step_s / (1 - busy)


def _job_time(speed: ReplicaSpeed, load: JobLoad, prefills: int, decoding: float, share: float) -> JobTime:
    tokens_s = load.rate * load.answer / decoding
    token_s = decode_s(speed, load, decoding, 1.0, share)
    for _ in range(_ROUNDS):
        before, token_s = token_s, decode_s(speed, load, decoding, tokens_s * token_s, share)
        if token_s <= 1.001 * before:
            break
    else:
        return JobTime(inf, inf, inf)
    batch = max(1.0, tokens_s * token_s)
    context = batch * load.context
    step_s, own_s = speed.costs.step_s(batch, context), speed.prefill_s(load.prompt, load.cached)
    beside_s = speed.prefill_s(load.prompt, load.cached, round(batch), context)
    wait_s = _wait_s(load.rate * (1 - share) / decoding, beside_s, load.variation, 1)
    apart_wait_s = _wait_s(load.rate * share, own_s, load.variation, prefills) if share else 0.0
    here_s = wait_s + beside_s + step_s / 2
    job_s = share * (apart_wait_s + own_s + load.pause_s) + (1 - share) * here_s + load.answer * token_s
    first_s = speed.prefill_s(load.longest) + log(1 / TAIL) * max(share * apart_wait_s, (1 - share) * wait_s)
    gap_s = step_s
    if load.rate * (1 - share) / decoding * token_s > TAIL:
        chunk = min(load.longest, speed.chunk_tokens or load.longest)
        gap_s += speed.added_s(chunk, 0, round(batch), context)
    if share > TAIL * load.answer:
        gap_s = max(gap_s, load.pause_s)
    return JobTime(job_s, first_s, gap_s)


def _wait_s(rate: float, prefill_s: float, variation: float, servers: int) -> float:
    """The mean wait in a queue of prefills for one of the `servers`; infinite if they do not keep up."""
    busy = rate * prefill_s / servers
    if busy >= MOST_BUSY:
        return inf
    return float((1 + variation) / 2 * busy ** (sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy)) * prefill_s)
