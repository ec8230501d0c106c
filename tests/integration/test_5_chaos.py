"""Faults at random times, and forced moves: no stream has more than a pause, and nothing leaks."""

from collections import Counter
from collections.abc import Sequence

import pytest

from benchmarks.chaos.answers import StreamVerdict
from benchmarks.chaos.faults import FaultKind, draw_faults
from benchmarks.chaos.offers import draw_trace, make_offers
from benchmarks.chaos.report import is_good, make_document, render
from benchmarks.chaos.run import ChaosRun
from benchmarks.chaos.server import connect
from benchmarks.chaos.watch import ClusterWatch
from benchmarks.soak.forcing import ForcedRound, Forcing, RoundShape, calculated
from tests.counts import LONG, LONG_ONLY
from tests.integration.application import Application

SEED, EVERY_S = 1, 1.8
SPAN_S = 300.0 if LONG else 24.0
ROUNDS, MOVES = 20, 150
COMMITTED, EACH = 80, 20
MOST_ROUNDS = ROUNDS + 5
"""A machine's speed decides how many moves a round holds, so further rounds follow until so many are committed."""

pytestmark = pytest.mark.timeout(1200 if LONG else 600)


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


@LONG_ONLY
async def test_forced_moves_change_nothing(paced: Application) -> None:
    # More than one replica can hold, so that the policy opens others as targets.
    shape = RoundShape(streams=12, at_once=12, prompt=(300, 300), output=(300, 500))
    async with connect(paced.url) as server:
        watch = ClusterWatch(server)
        await watch.look()
        forcing = Forcing(server, watch, shape, SEED, calculated)
        rounds: list[ForcedRound] = []
        while len(rounds) < ROUNDS or (len(rounds) < MOST_ROUNDS and not _are_enough(_committed(rounds))):
            rounds.append(await forcing.round(len(rounds), MOVES))
    assert [(done.bad, done.leaks) for done in rounds] == [([], [])] * len(rounds)
    assert [done.verdicts for done in rounds] == [[StreamVerdict.EXACT] * shape.streams] * len(rounds)
    moves = [move for done in rounds for move in done.moves]
    # Requests that end while they move, and full targets, are the rest.
    assert _are_enough(_committed(rounds)) and _committed(rounds).total() >= len(moves) / 2, moves


def _committed(rounds: Sequence[ForcedRound]) -> Counter[str]:
    """Committed moves by path."""
    return Counter(move["path"] for done in rounds for move in done.moves if move["outcome"] == "committed")


def _are_enough(committed: Counter[str]) -> bool:
    return committed.total() >= COMMITTED and min(committed["kv"], committed["tokens"]) >= EACH
