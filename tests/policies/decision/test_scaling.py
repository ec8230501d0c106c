"""When limits open replicas before they are needed, and when they close those that are not."""

from collections import Counter
from random import Random

import pytest

from policies.cluster import forecast
from policies.cluster.capacity import close_idle, spare_capacity, total_demand
from policies.cluster.cluster import Cluster
from policies.cluster.supply import WINDOW_S, Demand
from policies.cost.service import ReplicaSpeed, SpeedLimit
from policies.cost.steps import StepCosts, proportional
from policies.decision.deciding import SchedulerMemory, open_slack
from policies.decision.limits import DemandHistory, Limits
from policies.model import PoolId, ReplicaState, Tokens
from policies.rules.arrivals import Openings
from tests.policies.cluster.named import evict, impose, move, named, picture, place, replica, request, settled, turn
from tests.policies.stepping import Events, apply, begin_epoch


def scaled(
    cluster: Cluster, limits: Limits, now: float = 0.0, least: int = 0, demand: DemandHistory | None = None
) -> str:
    """The cluster after an epoch in which no policy does anything."""
    impose(cluster, min_replicas=least)
    begin_epoch(cluster, limits, now, demand)
    open_slack(cluster)
    close_idle(cluster, now, limits.linger_s)
    settled(cluster)
    return picture(cluster)


# --- replicas that are idle ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        pytest.param(0, "B: p10", id="all that are empty"),
        pytest.param(2, "A: | B: p10", id="the youngest first"),
        pytest.param(4, "A: | B: p10 | C: | D:", id="none below the minimum"),
        pytest.param(9, "A: | B: p10 | C: | D:", id="the minimum opens none"),
    ],
)
def test_idle_replicas_are_closed(least: int, expected: str) -> None:
    assert scaled(named("A: | B: p10 | C: | D:"), Limits(), least=least) == expected


def test_the_order_in_which_they_are_closed() -> None:
    cluster, limits = named("A: | B: | C:"), Limits()
    impose(cluster, min_replicas=1)
    begin_epoch(cluster, limits, 0.0)
    open_slack(cluster)
    close_idle(cluster, 0.0, limits.linger_s)
    assert cluster.decisions.settle().closed == ("C", "B")


def test_a_replica_is_not_idle_while_it_holds_blocks() -> None:
    cluster = named("A: p10 | B:", holds=True)
    move(cluster, "p", "B")
    assert [scaled(cluster, Limits()) for _ in range(2)] == ["A: | B: p10"] * 2
    cluster.release(request(cluster, "p"))
    assert scaled(cluster, Limits()) == "B: p10"


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING])
def test_replicas_that_do_not_run_are_neither_closed_nor_counted(state: ReplicaState) -> None:
    cluster = named("A: p10 | B: | C:")
    turn(cluster, replica(cluster, "C"), state)
    assert scaled(cluster, Limits(), least=2) == "A: p10 | B: | C:"
    assert scaled(cluster, Limits(), least=1) == "A: p10 | C:"


def test_an_idle_replica_lingers() -> None:
    cluster, limits = named("A: p10 | B:"), Limits(linger_s=5.0)
    stays = [scaled(cluster, limits, now=now) == "A: p10 | B:" for now in (3.0, 7.9, 8.0)]
    assert stays == [True, True, False]


def test_one_that_was_used_lingers_anew() -> None:
    cluster, limits = named("A: p10 | B:", "s10"), Limits(linger_s=5.0)
    scaled(cluster, limits, now=0.0)
    place(cluster, "s", "B")
    scaled(cluster, limits, now=4.0)
    evict(cluster, "s")
    stays = [scaled(cluster, limits, now=now) == "A: p10 | B:" for now in (6.0, 10.9, 11.0)]
    assert stays == [True, True, False]


# --- what is to stay free -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slack", "expected"),
    [
        pytest.param(0.0, "A: p90", id="nothing"),
        pytest.param(0.1, "A: p90 | gpu-0:", id="the last tokens of a replica do not count"),
        pytest.param(1.0, "A: p90 | gpu-0:", id="a replica"),
        pytest.param(1.1, "A: p90 | gpu-0: | gpu-1:", id="a little more"),
        pytest.param(9.0, "A: p90 | gpu-0: | gpu-1: | gpu-2:", id="more than is to be had"),
    ],
)
@pytest.mark.parametrize("starts_as", [ReplicaState.RUNNING, ReplicaState.STARTING])
def test_slack_is_kept_free(slack: float, expected: str, starts_as: ReplicaState) -> None:
    cluster = named("A: p90", supply=3, starts_as=starts_as)
    assert [scaled(cluster, Limits(slack=slack)) for _ in range(2)] == [expected] * 2


@pytest.mark.parametrize(
    ("forecast", "expected"),
    [
        pytest.param(-40, "A: p90", id="what waits is over by then"),
        pytest.param(-20, "A: p90", id="what is left takes the whole capacity"),
        pytest.param(-19, "A: p90 | gpu-0:", id="more is left than the capacity"),
    ],
)
def test_by_a_forecast_replicas_open_for_the_demand_at_the_end_of_a_start(forecast: int, expected: str) -> None:
    cluster = named("A: p90", "s30", supply=3)
    impose(cluster, forecast=forecast)
    assert scaled(cluster, Limits()) == expected


@pytest.mark.parametrize(("peak", "expected"), [(60, "A: p40"), (61, "A: p40 | B:")])
def test_by_a_forecast_replicas_close_that_the_next_start_does_not_need(peak: int, expected: str) -> None:
    cluster = named("A: p40 | B:")
    impose(cluster, forecast=0, peak=peak)
    assert scaled(cluster, Limits()) == expected


def test_capacity_is_kept_that_the_next_start_needs_more_likely_than_not() -> None:
    demand, limits, draw, level = DemandHistory(), Limits(foresight_s=20.0, foreseen=0.95), Random(1), 0.0
    needed, kept = [], []
    for now in range(900):
        level = 0.95 * level + draw.gauss(0, 300)
        tokens = 10_000 + round(level)
        demand.observe(limits, tokens, 0.0, float(now))
        needed.append(tokens + demand.change)
        kept.append(tokens + demand.peak)
    reopened = [max(needed[now : now + 20]) > kept[now] for now in range(300, 880)]
    assert 0.3 < sum(reopened) / len(reopened) < 0.6
    assert all(keep >= need for keep, need in zip(kept, needed, strict=True))


def test_pools_look_for_periods_in_different_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes milliseconds: 40 in one epoch would be most of it."""
    searched: Counter[int] = Counter()
    now = 0
    monkeypatch.setattr(forecast, "find_period", lambda *_: searched.update([now]) or 0)
    memory = SchedulerMemory()
    pools = [memory.pool(PoolId(f"p{number}")).learned.demand for number in range(40)]
    for now in range(180):
        for demand in pools:
            demand.observe(Limits(foresight_s=20.0, foreseen=0.95), 100, 0.0, float(now))
    assert max(searched.values()) == 2, "those of the change and of the need of one pool"
    assert sum(searched.values()) == 40 * 2 * 3


@pytest.mark.parametrize(
    ("drawing", "for_requests", "opens"), [("A: p90", True, True), ("A: p90", False, False), ("", False, True)]
)
def test_without_openings_for_requests_one_opens_only_the_first_replica(
    drawing: str, for_requests: bool, opens: bool
) -> None:
    cluster = named(drawing, "s30", supply=1)
    impose(cluster, opens_for_requests=for_requests)
    assert (Openings(cluster).replica_for(request(cluster, "s")) is not None) == opens


def test_what_is_needed_for_the_slack_is_not_closed() -> None:
    assert scaled(named("A: p40 | B: | C:"), Limits(slack=1.6)) == "A: p40 | B:"


def test_what_waits_takes_its_part_of_the_slack() -> None:
    assert scaled(named("A: p40", "s30"), Limits(slack=0.5)) == "A: p40 | gpu-0:"


def test_what_moves_away_leaves_room_for_the_slack() -> None:
    cluster = named("A: p60 | B: q50", holds=True)
    move(cluster, "p", "B")
    assert spare_capacity(cluster) == 100


@pytest.mark.parametrize(
    ("state", "spare"),
    [
        (ReplicaState.RUNNING, 110),
        (ReplicaState.STARTING, 110),
        (ReplicaState.DRAINING, 60),
        (ReplicaState.STOPPED, 60),
    ],
)
def test_room_is_spare_on_what_is_up_or_will_be(state: ReplicaState, spare: int) -> None:
    cluster = named("A: p40 | B: q50")
    turn(cluster, replica(cluster, "B"), state)
    assert spare_capacity(cluster) == spare


@pytest.mark.parametrize(("size", "spare"), [(70, 50), (71, 40)], ids=["C/8 or more", "less"])
def test_room_is_spare_in_pieces_of(size: int, spare: int) -> None:
    assert spare_capacity(named(f"A: p40 | B: q{size}", capacity=80)) == spare


@pytest.mark.parametrize(
    ("size", "spare"), [(71, 49), (90, 30)], ids=["small remainders", "demand beyond the capacity"]
)
def test_by_a_forecast_all_capacity_beyond_the_demand_is_spare(size: int, spare: int) -> None:
    cluster = named(f"A: p40 | B: q{size}", capacity=80)
    impose(cluster, forecast=0)
    assert spare_capacity(cluster) == spare


@pytest.mark.parametrize(("limited", "spare"), [(False, 40), (True, 60)], ids=["the largest rise", "a forecast"])
def test_headroom_is_spare_where_a_forecast_has_the_growth(limited: bool, spare: int) -> None:
    cluster, speed = named("A: p20 q20"), SpeedLimit(ReplicaSpeed(StepCosts(proportional(0.001))))
    impose(cluster, headroom=10, speed=speed if limited else None)
    assert spare_capacity(cluster) == spare
    assert spare_capacity(cluster) + total_demand(cluster) == (100 if limited else 80)


def test_total_is_what_runs_and_what_waits() -> None:
    cluster = named("A: p40 | B: q50", "s10")
    replica(cluster, "A").shared = -5
    assert total_demand(cluster) == 95


# --- demand -------------------------------------------------------------------------------------------


LONG = WINDOW_S + 1
"""The last time at which a rise at time 1 is remembered."""


def rises(*totals: tuple[float, int]) -> list[int]:
    """The rise after each observation, within ten seconds."""
    demand = Demand()
    seen = []
    for now, tokens in totals:
        demand.observe(now, tokens, within_s=10.0)
        seen.append(demand.rise)
    return seen


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        pytest.param([(0, 50)], [0], id="what was there is no rise"),
        pytest.param([(0, 50), (5, 70), (6, 60)], [0, 20, 20], id="the largest counts"),
        pytest.param([(0, 50), (5, 40), (9, 55)], [0, 0, 15], id="from the lowest"),
        pytest.param([(0, 50), (10, 70), (10.1, 80)], [0, 20, 20], id="within the time"),
        pytest.param(
            [(0, 0), (1, 30), (2, 20), (WINDOW_S + 1, 20), (WINDOW_S + 2, 20)], [0, 30, 30, 30, 20], id="lately"
        ),
    ],
)
def test_rise(totals: list[tuple[float, int]], expected: list[int]) -> None:
    assert rises(*totals) == expected


def test_a_rise_is_kept_free() -> None:
    cluster, limits, demand = named("A: p10 | B:"), Limits(foresight_s=10.0), DemandHistory()
    assert scaled(cluster, limits, now=0.0, demand=demand) == "A: p10"
    apply(cluster, Events({request(cluster, "p").id: Tokens(60)}))
    assert scaled(cluster, limits, now=1.0, demand=demand) == "A: p60 | gpu-0:"
