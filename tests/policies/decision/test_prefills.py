"""`disaggregation.mode: auto`: how many replicas are for prefills, and which prompts they get."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.changes import Arrival
from policies.cost.job_times import MOST_BUSY
from policies.cost.service import ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts, proportional
from policies.decision.deciding import place
from policies.decision.disaggregation.prefill_load import LOAD_WINDOW_S, PrefillLoad, PrefillReason
from policies.decision.disaggregation.prefills import DWELL_S, prefill_report
from policies.decision.disaggregation.roles import set_role
from policies.decision.limits import LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.decision.placement import Place
from policies.model import Blocks, ReplicaId, RequestId, Role, Tokens
from policies.paths.prices import Profile
from tests.policies.decision.observed import Drawn, Watcher, observed

SPEED = ReplicaSpeed(StepCosts(proportional(0.02), 0.02), chunk_tokens=50)
"""A prompt of ten tokens takes 0.22 s, a step 0.02 s and as much for each request."""
TERMS = Terms(
    policy="worst_fit",
    speed=SPEED,
    decode_rate=10.0,
    limits=LiveLimits(linger_s=0.0, foresight_s=0.0, lead_s=1.0, slack=0.0),
    placement_ttl_s=0.5,
    prefill_replicas=3,
    auto_prefills=True,
)
DRAWN = "a: p10 | b: q10 | c: r10 | d: s10"
"""Four requests decode forty tokens per second."""
FULL = " | ".join(f"{name}: " + " ".join(f"{name}{letter}10" for letter in "pqr") for name in "abcd")
"""Three requests on each replica."""


def roomy(drawn: Drawn) -> Drawn:
    """The same cluster on replicas with room for a thousand tokens."""
    used = [sum(q.tokens for q in load.requests) for load in drawn.loads]
    sizes = [(load, Blocks(1000 - tokens)) for load, tokens in zip(drawn.loads, used, strict=True)]
    return replace(
        drawn,
        loads=tuple(
            replace(load, capacity_tokens=Tokens(1000), free_blocks=free, max_requests=1000) for load, free in sizes
        ),
    )


class Auto(Watcher):
    """A pool with arrivals, which has an epoch per second and reports what is drawn: what is placed ends at once."""

    def __init__(self, terms: Terms = TERMS) -> None:
        super().__init__(PoolMemory(terms), least=4)
        self.now = 0.0
        self.counts: list[int] = []
        for name in "abcd":
            self.memory.learned.estimates.profile(ReplicaId(name), Profile("n", "cache", 1.0))

    def live(self, seconds: float, rate: int, prompt: int = 10, drawn: str = DRAWN) -> list[Place]:
        """The placements of `rate` arrivals per second."""
        placed = []
        for _ in range(round(seconds)):
            self.decide(roomy(observed(drawn, self.now)))
            self.counts.append(len(self.memory.cluster.prefills()))
            for number in range(rate):
                at = self.now + (number + 1) / (rate + 1)
                placed.append(self.arrive(prompt, at))
            self.now += 1.0
        return placed

    def arrive(self, prompt: int, at: float) -> Place:
        found = place(self.memory, Arrival(RequestId(f"n{at}"), Tokens(prompt)), at)
        assert isinstance(found, Place)
        self.memory.cluster.check_integrity()
        return found

    @property
    def why(self) -> PrefillReason:
        found = prefill_report(self.memory)
        assert found is not None
        return found.reason


# --- per epoch ----------------------------------------------------------------------------------------


def test_all_do_both_until_enough_is_known() -> None:
    made = Auto()
    made.live(DWELL_S - 1, rate=6)
    assert set(made.counts) == {0} and made.why is PrefillReason.MEASURING
    unknown = Auto(replace(TERMS, speed=None))
    unknown.live(3 * DWELL_S, rate=6)
    assert set(unknown.counts) == {0} and unknown.why is PrefillReason.MEASURING


def test_prefills_get_replicas_where_they_lengthen_the_steps_of_many_tokens() -> None:
    made = Auto()
    made.live(40, rate=6)
    assert made.counts[-1] > 0 and made.why is PrefillReason.TIMES
    roles = [replica.role for replica in made.memory.cluster.running()]
    assert set(roles) == {Role.PREFILL, Role.BOTH}, "the others take what is not worth a hand-over"
    short = Auto()
    short.live(40, rate=1, prompt=1)
    assert set(short.counts) == {0} and short.why is PrefillReason.TIMES


@pytest.mark.slow
def test_number_is_the_best_by_prediction_and_changes_once_in_the_dwell_time_at_most() -> None:
    made = Auto()
    for rate, prompt, drawn in ((6, 10, DRAWN), (1, 1, FULL), (8, 10, DRAWN), (1, 1, FULL)):
        made.live(90, rate, prompt, drawn)
        times = made.memory.learned.prefill_load.times
        assert times[made.counts[-1]] <= min(times.values()) / 0.95
    changes = [at for at, (one, other) in enumerate(pairwise(made.counts)) if one != other]
    assert len(changes) > 3
    assert all(later - earlier >= DWELL_S for earlier, later in pairwise(changes))


def test_replicas_do_both_again_at_once_where_the_others_would_lack_room() -> None:
    made = Auto()
    made.live(40, rate=6)
    assert made.counts[-1] > 0
    made.live(1, rate=0, drawn="a: p950 | b: q950 | c: r950 | d: s500")
    assert made.counts[-1] == 0 and made.why is PrefillReason.ROOM


def test_none_are_for_prefills_where_no_number_keeps_up() -> None:
    made = Auto()
    made.live(40, rate=6)
    assert made.counts[-1] > 0
    made.live(60, rate=10, prompt=30)
    assert made.counts[-1] == 0 and made.why is PrefillReason.OVERLOAD


def test_an_operators_replicas_for_prefills_are_the_least() -> None:
    made = Auto()
    set_role(made.memory, ReplicaId("c"), Role.PREFILL)
    made.live(40, rate=6, prompt=1)
    assert set(made.counts) == {1}
    assert made.memory.cluster.replicas[ReplicaId("c")].role is Role.PREFILL


def test_a_level_that_prefills_beside_decoding_break_outweighs_the_mean_time() -> None:
    costs = []
    for level in (None, ServiceLevel(None, 0.1)):
        made = Auto(replace(TERMS, service=level))
        made.live(40, rate=1, prompt=12)
        costs.append(made.memory.learned.prefill_load.times)
    assert costs[0][0] < 1.2 * costs[0][2] and costs[1][0] > 10 * costs[1][2]


# --- per arrival --------------------------------------------------------------------------------------


def divided() -> Auto:
    """A pool with replicas for prefills."""
    made = Auto()
    made.live(40, rate=6)
    assert made.counts[-1] > 0
    return made


def test_prompts_are_handed_over_where_they_would_delay_others() -> None:
    made = divided()
    apart = {replica.id for replica in made.memory.cluster.prefills()}
    beside = made.arrive(40, made.now - 0.5)
    assert beside.replica in apart and beside.then is not None and beside.then.target not in apart
    made.live(3, rate=0, drawn="a: | b: | c: | d:")
    alone = made.arrive(40, made.now - 0.5)
    assert alone.replica not in apart and alone.then is None


def test_prompts_wait_in_no_long_line_at_replicas_for_prefills() -> None:
    made = divided()
    apart = {replica.id for replica in made.memory.cluster.prefills()}
    placed = [made.arrive(20, made.now + 0.001 * number) for number in range(20)]
    there = [each for each in placed if each.replica in apart]
    assert 0 < len(there) < len(placed)
    assert all(each.then is not None for each in there)
    assert all(each.then is None for each in placed if each.replica not in apart)


# --- the load -----------------------------------------------------------------------------------------


def test_mean_job_of_the_newest_placements() -> None:
    load = PrefillLoad()
    assert load.job_load(5.0) is None and load.answer(5.0) == 0.0
    for second in range(100):
        load.add_placement(10 if second % 2 else 30, 6, 1.0 if second % 2 else 3.0, second >= 70, float(second))
        load.add_epoch(50.0, 40.0, [2, 2], float(second))
    job = load.job_load(99.0)
    assert job is not None
    assert (job.rate, job.prompt, job.cached, job.variation) == (1.0, 20, 6, 0.25)
    assert (job.longest, job.answer, job.context, job.pause_s) == (30, 50.0, 40.0, 0.0)
    assert load.share_apart == 30 / 60
    assert load.busy(apart=True, replicas=2, now=99.0) == 30 * 2.0 / LOAD_WINDOW_S / 2
    assert load.busy(apart=True, replicas=1, now=99.0) == MOST_BUSY
    assert load.busy(apart=True, replicas=1, now=500.0) == 0.0 and load.job_load(500.0) is None


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=30))
def test_evenness_is_a_share(epochs: list[list[int]]) -> None:
    load = PrefillLoad()
    load.add_placement(10, 0, 1.0, apart=False, now=0.0)
    for second, batches in enumerate(epochs):
        load.add_epoch(1.0, 1.0, batches, float(second))
        assert all(0.0 < spread <= 1.0 + 1e-9 for spread in load.spreads.values())
