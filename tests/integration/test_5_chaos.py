"""Faults at random times, and forced moves by the dozen: no stream notices more than a pause, and nothing is left."""

from collections import Counter

from benchmarks.chaos.forcing import Forcing, Shape, calculated
from benchmarks.chaos.heard import Verdict
from benchmarks.chaos.offers import draw_trace, make_offers
from benchmarks.chaos.report import is_good, make_document, render
from benchmarks.chaos.run import Run
from benchmarks.chaos.server import connect
from benchmarks.chaos.strikes import Kind, draw_strikes
from benchmarks.chaos.watch import Watch
from tests.counts import LONG
from tests.integration.application import Application

SEED, EVERY_S = 1, 1.8
SPAN_S = 300.0 if LONG else 24.0
ROUNDS, MOVES = (20 if LONG else 2), 150


async def test_faults_at_random_times_cost_pauses(paced: Application) -> None:
    offers = make_offers(draw_trace(SEED, SPAN_S), SEED)
    strikes = draw_strikes(SEED, SPAN_S, EVERY_S)
    assert {strike.kind for strike in strikes} == set(Kind)
    async with connect(paced.url) as server:
        result = await Run(server).run(offers, strikes)
    document = make_document(result, {"seed": SEED})
    assert is_good(result), render(document)
    assert document["streams"][Verdict.EXACT] > len(offers) / 2, render(document)
    assert document["faults"][Kind.KILL]["streams"], "no stream was on the replica that was killed"


async def test_forced_moves_change_nothing(paced: Application) -> None:
    # More than one replica holds, so that the policy opens others: there has to be somewhere to move to.
    shape = Shape(streams=12, at_once=12, prompt=(300, 300), output=(300, 500))
    async with connect(paced.url) as server:
        watch = Watch(server)
        await watch.look()
        forcing = Forcing(server, watch, shape, SEED, calculated)
        rounds = [await forcing.round(number, MOVES) for number in range(ROUNDS)]
    assert [(done.bad, done.leaks) for done in rounds] == [([], [])] * ROUNDS
    assert [done.verdicts for done in rounds] == [[Verdict.EXACT] * shape.streams] * ROUNDS
    told = Counter((move["path"], move["outcome"], move["error"]) for done in rounds for move in done.moves)
    committed = Counter({path: told[path, "committed", None] for path in ("kv", "tokens")})
    assert committed.total() >= 80 and min(committed.values()) >= 20, told
