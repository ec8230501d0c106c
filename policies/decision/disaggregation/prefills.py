"""`disaggregation.mode: auto`: how many replicas prefill, and which prompts they get.

Per epoch, the number with the least time of a job by prediction (`policies.cost.job_times`), weighted with the targets
of a service level. It changes by BAND at least and after DWELL_S seconds at the earliest; only where the other replicas
would lack room, replicas return to both parts at once. Where no number keeps up with the arrivals, as few as possible
are for prefills: replicas that do both leave none of their time unused. No replica is opened or kept for prefills.

Per arrival, the prompt is prefilled apart and handed over if that costs less than its prefill where it would be placed
otherwise. Both cost the seconds to the first token, of which the wait for earlier prefills counts for later ones, too
(a queue that is busy for the share u of its time passes a delay on 1 / (1 - u) times), and the decoding of the answer
there, its delay of other requests included. The hand-over adds its pause, the prefill beside decoding requests what it
adds to the steps of each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from policies.cluster.capacity import total_demand
from policies.cluster.replica import Replica
from policies.cost.job_times import JobLoad, JobTime, job_time
from policies.cost.service import ServiceLevel
from policies.decision.disaggregation.prefill_load import PrefillReason
from policies.decision.level.service import level_of, replica_speed
from policies.decision.memory import PoolMemory
from policies.model import RequestId, Role, Tokens
from policies.plan import Move, Reason
from policies.prefix.routing import ReplicaScore

DWELL_S = 15.0
"""The least seconds between two changes of the number of replicas for prefills."""
BAND = 0.05
"""The least share of a job's time that a change has to save."""
ROOM = 0.8
ROOM_LEFT = 0.95
"""The shares of their KV caches that requests may take for one more replica to be for prefills, or for none less."""


def prefill_count(memory: PoolMemory, running: Sequence[Replica], least: int, most: int, now: float) -> int:
    """The number of replicas for prefills from this epoch on, between `least` and `most`."""
    load, cluster = memory.learned.prefill_load, memory.cluster
    taken, requests = total_demand(cluster) + cluster.conditions.slack, len(cluster.requests)
    context = sum(replica.load for replica in running) / max(1, requests - len(cluster.waiting))
    decoded = memory.locations.decoding * memory.learned.experience.decode_rate
    load.add_epoch(decoded, context, [len(r.requests) for r in _hosts(running)], now)
    others = {share: len(running) - _replicas_for(taken, share * cluster.capacity) for share in (ROOM, ROOM_LEFT)}
    count = max(least, min(load.count, most))
    if count > others[ROOM_LEFT] and count > least:
        load.count, load.since, load.reason = max(least, others[ROOM_LEFT]), now, PrefillReason.ROOM
        return load.count
    if load.count != count or load.since is None:
        load.count, load.since = count, now if load.since is None else load.since
    if now < load.since + DWELL_S or len(running) < 2:
        return count
    job = _job(memory, running, now)
    if job is None:
        load.reason = PrefillReason.MEASURING
        return count
    level = level_of(memory, now)
    numbers = _candidates(count, least, max(count, min(most, others[ROOM])))
    times = {number: _job_time(memory, running, job, number, level) for number in numbers}
    costs = {number: time.cost_s(level) for number, time in times.items() if not time.is_overload}
    load.times, load.reason = costs, PrefillReason.TIMES if costs else PrefillReason.OVERLOAD
    best = min(costs, key=lambda number: costs[number], default=least)
    if best != count and costs.get(best, 0.0) < (1 - BAND) * costs.get(count, inf):
        load.count, load.since = best, now
    return load.count


def _replicas_for(tokens: int, each: float) -> int:
    return max(1, -int(-tokens // each))


def _hosts(running: Iterable[Replica]) -> list[Replica]:
    return [replica for replica in running if replica.role is not Role.PREFILL]


def _candidates(count: int, least: int, most: int) -> list[int]:
    """The numbers to compare: the present one, the least, and those that differ from it by a power of two."""
    steps = [1 << power for power in range(max(1, most - least).bit_length())]
    found = {count, least, *(count - step for step in steps), *(count + step for step in steps)}
    return sorted(number for number in found if least <= number <= most)


def _job(memory: PoolMemory, running: Sequence[Replica], now: float) -> JobLoad | None:
    """The mean job of the pool; None before an arrival, and while step times are unknown."""
    load, speed = memory.learned.prefill_load, replica_speed(memory)
    mean = load.job_load(now)
    if mean is None or speed is None:
        return None
    first, *others = sorted(running, key=lambda replica: (replica.role is not Role.PREFILL, replica.order))
    tokens = Tokens(mean.prompt + mean.cached)
    move = Move(RequestId(""), first.id, others[0].id, tokens, Reason.DISAGGREGATE, 0)
    prefill_s = speed.prefill_s(mean.prompt, mean.cached)
    last, estimates = _last(memory, mean.prompt), memory.learned.estimates
    pause_s = estimates.hand_over_s(move, prefill_s, last, (), now, memory.router.present)
    return replace(mean, pause_s=pause_s)


def _job_time(memory: PoolMemory, running: Sequence[Replica], job: JobLoad, count: int, level: ServiceLevel) -> JobTime:
    hosts = (len(running) - count) * memory.learned.prefill_load.spreads[count > 0]
    return job_time(memory.learned.routing.speed, job, count, hosts, level)


def _last(memory: PoolMemory, computed: int) -> Tokens:
    """The tokens of the last chunk of a prefill."""
    return Tokens(min(computed, memory.learned.routing.speed.chunk_tokens or computed))


def is_handed_over(
    memory: PoolMemory,
    move: Move,
    apart: ReplicaScore,
    here: ReplicaScore,
    under_way: Iterable[Move],
    now: float,
) -> bool:
    """True if a prompt is prefilled at the source of `move`, and decodes at its target; else all of it is `here`."""
    cluster, load, speed = memory.cluster, memory.learned.prefill_load, memory.learned.routing.speed
    target, other, prefills = cluster.replicas[move.target], cluster.replicas[here.replica], len(cluster.prefills())
    computed = max(1, move.tokens - _cached(apart))
    pause_s = memory.learned.estimates.hand_over_s(
        move, apart.prefill_s, _last(memory, computed), under_way, now, memory.router.present
    )
    answer = load.answer(now)
    apart_s = apart.first_token_s / (1 - load.busy(True, prefills, now)) + pause_s
    apart_s += answer * _decoding_s(memory, target, move.tokens)
    batch, hosts = len(other.requests), len(cluster.running()) - prefills
    added_s = speed.added_s(max(1, move.tokens - _cached(here)), _cached(here), batch, other.load)
    here_s = here.first_token_s / (1 - load.busy(False, hosts, now)) + batch * added_s
    here_s += answer * _decoding_s(memory, other, move.tokens)
    return apart_s < here_s


def _cached(score: ReplicaScore) -> int:
    return max(score.hbm, score.fetch.tokens if score.fetch is not None else 0)


def _decoding_s(memory: PoolMemory, replica: Replica, tokens: int) -> float:
    """Seconds that a token of a request of that size takes of all requests of a replica."""
    step_s, batch = memory.learned.routing.speed.costs.step_s, len(replica.requests)
    with_s = (batch + 1) * step_s(batch + 1, replica.load + tokens)
    return with_s - batch * step_s(batch, replica.load) if batch else with_s


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """The number of replicas for prefills, `at_most` that many, and its reason.

    `apart_share` is the share of the newest prompts that are prefilled there. `predicted_s` are the times of a job, by
    number of these replicas, weighted with the targets of a service level; none before there are predictions.
    """

    prefill_replicas: int
    at_most: int
    reason: PrefillReason
    apart_share: float
    predicted_s: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        """The member `disaggregation` of `/mell/state`."""
        return asdict(self) | {"predicted_s": {str(number): s for number, s in self.predicted_s.items()}}


def prefill_report(memory: PoolMemory) -> PrefillReport | None:
    """The number of replicas for prefills with its reason; None unless the decision chooses it."""
    terms, load = memory.terms, memory.learned.prefill_load
    if not terms.auto_prefills:
        return None
    found = len(memory.cluster.prefills())
    return PrefillReport(found, terms.prefill_replicas, load.reason, load.share_apart, load.times)
