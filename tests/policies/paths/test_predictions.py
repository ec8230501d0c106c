"""Prices against the durations of moves between engines whose steps, links and hand-overs are known."""

import random
from dataclasses import replace
from statistics import median

import pytest

from policies.cost.fit import StepFit, StepTotals
from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, prompt_chunks, proportional
from policies.model import Bytes, ReplicaId, RequestId, Tokens
from policies.paths.estimates import Boundaries, Estimates
from policies.paths.prices import Profile, TargetWork
from policies.plan import Move, MoveReport, Path, Reason
from policies.prefix.copies import CopyReport

COSTS = StepCosts(proportional(1e-4), overhead_s=0.02, sequence_s=1e-4, context_s=5e-7, attention_s=1e-9)
CHUNK = 512
LINK, TOKEN_BYTES = Line.of(2e8, 0.03), 100_000.0
HANDOVERS_S = {Path.KV: 0.08, Path.TOKENS: 0.05}
NOISE = 0.1
A, B = ReplicaId("a"), ReplicaId("b")


class Engines:
    """Two replicas on one node; all of their times vary by NOISE around the truth."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.steps = StepFit()
        self.estimates = Estimates(Boundaries(time_limit_s=1e6, slowdown=1e6), 1.0)
        for replica in (A, B):
            self.estimates.profile(replica, Profile("node", "cache", TOKEN_BYTES))

    def noisy(self, seconds: float) -> float:
        return seconds * self.draw.uniform(1 - NOISE, 1 + NOISE)

    def run_epoch(self, now: float) -> None:
        """Decode a batch for twenty steps, beside which a prompt is prefilled in some epochs, and fit the formula."""
        batch, totals = self.draw.randint(1, 40), StepTotals()
        context = batch * self.draw.randint(100, 3000)
        prompt = self.draw.randint(100, 4000) if self.draw.random() < 0.5 else 0
        chunks = [[chunk] for chunk in prompt_chunks(prompt, CHUNK)] if prompt else []
        for chunk in [*chunks, *([[]] * 20)]:
            totals = totals.add(self.noisy(COSTS.step_s(batch, context, chunk)), batch, context, chunk)
        self.steps.add(totals, now)
        if (fitted := self.steps.fitted) is not None:
            self.estimates.follow(ReplicaSpeed(fitted.costs, fitted.error, CHUNK))

    def move(self, name: str, path: Path, now: float) -> float | None:
        """Move a request from a to b; the relative error of its prediction, None without one."""
        tokens, batch = self.draw.randint(50, 6000), self.draw.randint(0, 40)
        work = TargetWork(batch, 1000.0 * batch)
        order = Move(RequestId(name), A, B, Tokens(tokens), Reason.DRAIN, 0)
        choice = self.estimates.decide(order, (), now, work_of=lambda replica, at: work)
        predicted_s = choice.kv_s if path is Path.KV else choice.tokens_s
        size = Bytes(round(tokens * TOKEN_BYTES))
        copy_s = self.noisy(LINK.seconds(size)) if path is Path.KV else 0.0
        computed_s = self.noisy(COSTS.prefill_s(tokens, 0, CHUNK, batch, 1000.0 * batch)) if not copy_s else 0.0
        whole_s = copy_s + computed_s + self.noisy(HANDOVERS_S[path])
        sent = size if copy_s else Bytes(0)
        report = MoveReport(order.request, A, B, True, path, whole_s=whole_s, tokens=order.tokens, sent=sent)
        self.estimates.learn(replace(report, copy_s=copy_s), now)
        return abs(predicted_s - whole_s) / whole_s if predicted_s < float("inf") else None

    def copy(self, now: float) -> float:
        """Copy a prefix from a to b; the relative error of its prediction."""
        tokens = Tokens(self.draw.randint(200, 6000))
        line = self.estimates.copying(A, B, now)
        took_s = self.noisy(LINK.seconds(tokens * TOKEN_BYTES))
        self.estimates.learn_copy(CopyReport(A, B, tokens, took_s, True), now)
        assert line is not None
        return abs(line.seconds(tokens) - took_s) / took_s


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("path", Path)
def test_predictions_come_as_near_to_the_actual_times_as_these_vary(path: Path, seed: int) -> None:
    """For moves by the path that is chosen, and for the other one, whatever batch decodes at the target."""
    engines, errors = Engines(seed), []
    for now in range(60):
        engines.run_epoch(float(now))
        errors.append(engines.move(f"r{now}", path, float(now)))
    known = [error for error in errors[20:] if error is not None]
    assert len(known) == 40 and median(known) < NOISE
    assert sorted(known)[35] < 3 * NOISE


@pytest.mark.parametrize("seed", range(5))
def test_copies_and_moves_teach_each_other_the_link(seed: int) -> None:
    engines, copies, moves = Engines(seed), [], []
    for now in range(60):
        engines.run_epoch(float(now))
        if now < 20 or now % 2:
            moves.append(engines.move(f"r{now}", Path.KV, float(now)))
        else:
            copies.append(engines.copy(float(now)))
    assert copies[0] < 2.5 * NOISE, "the first copy is priced by the moves before it"
    assert median(copies) < NOISE and median(error or 0.0 for error in moves[10:]) < NOISE
