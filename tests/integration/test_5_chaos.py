"""Faults at random times, and forced moves: no stream has more than a pause, and nothing leaks."""

from collections import Counter

import pytest

from benchmarks.chaos.answers import StreamVerdict
from benchmarks.chaos.faults import FaultKind, draw_faults
from benchmarks.chaos.offers import draw_trace, make_offers
from benchmarks.chaos.report import is_good, make_document, render
from benchmarks.chaos.run import ChaosRun
from benchmarks.chaos.server import connect
from benchmarks.chaos.watch import ClusterWatch
from benchmarks.soak.forcing import Forcing, RoundShape, calculated
from tests.counts import LONG
from tests.integration.application import Application

SEED, EVERY_S = 1, 1.8
SPAN_S = 300.0 if LONG else 24.0
ROUNDS, MOVES = (20 if LONG else 1), 150

pytestmark = pytest.mark.timeout(1200 if LONG else 300)


async def test_faults_at_random_times_cost_pauses(paced: Application) -> None:
    offers = make_offers(draw_trace(SEED, SPAN_S), SEED)
    faults = draw_faults(SEED, SPAN_S, EVERY_S)
    assert {fault.kind for fault in faults} == set(FaultKind)
    async with connect(paced.url) as server:
        result = await ChaosRun(server).run(offers, faults)
    document = make_document(result, {"seed": SEED})
    assert is_good(result), render(document)
    assert document["streams"][StreamVerdict.EXACT] > len(offers) / 2, render(document)
    assert document["faults"][FaultKind.KILL]["streams"], "no stream was on a killed replica"


async def test_forced_moves_change_nothing(paced: Application) -> None:
    # More than one replica can hold, so that the policy opens others as targets.
    shape = RoundShape(streams=12, at_once=12, prompt=(300, 300), output=(300, 500))
    async with connect(paced.url) as server:
        watch = ClusterWatch(server)
        await watch.look()
        forcing = Forcing(server, watch, shape, SEED, calculated)
        rounds = [await forcing.round(number, MOVES) for number in range(ROUNDS)]
    assert [(done.bad, done.leaks) for done in rounds] == [([], [])] * ROUNDS
    assert [done.verdicts for done in rounds] == [[StreamVerdict.EXACT] * shape.streams] * ROUNDS
    moves = Counter((move["path"], move["outcome"], move["error"]) for done in rounds for move in done.moves)
    committed = Counter({path: moves[path, "committed", None] for path in ("kv", "tokens")})
    assert committed.total() >= 80 and min(committed.values()) >= 20, moves
