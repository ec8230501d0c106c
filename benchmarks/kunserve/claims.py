"""The paper's claims one by one: our figures beside each, and the verdict by the rules of MELL's claims.

Numbers of claims are of the stored version of the paper (arXiv 2412.18169). A claim "up to" is measured at the load
that is best for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.evaluation.sections.claims import Finding, Verdict, holds_on, up_to
from benchmarks.evaluation.words import share
from benchmarks.kunserve.case import MAIN, MODELS, PairCase, PairContender
from benchmarks.kunserve.results import Outcomes, PairFigures, PairOutcome, figures
from benchmarks.kunserve.windows import PairWindow
from simulator.outcome.statistics import mean
from simulator.world.setup import Exchange

LOADS = (1.25, 1.375, 1.5)
"""Requests per second and replica: spikes exceed whole pools a little, by what pairs hold, by more."""
FIT = LOADS[1]
SPIKES = PairWindow("spikes", FIT)
OTHERS = (PairWindow("on-off", 1.3), PairWindow("clumps", 1.8))
"""Windows that nothing was tuned to."""
LENGTHS = (PairWindow("spikes", 0.85, "AzureConv"), PairWindow("spikes", 1.9, "AGIEval-CoT"))
SHARES = (0.13, 0.56)
GBPS = (25.0, 200.0)
SIZES = (2, 4, 8)
SMALL = (
    PairCase(PairContender.PAIRS, PairWindow("spikes", 3.0), "Qwen 2.5 14B"),
    PairCase(PairContender.PAIRS, PairWindow("spikes", 6.0), "Llama 3 8B"),
)
LONG = PairCase(PairContender.PAIRS, PairWindow("spikes", 0.75), long=500)
TTFT_TIMES, TPOT_P50, TPOT_P99, OUTSIDE = 10.0, 1.4, 1.8, 0.05
"""Mell's own goals: TTFT p99 this many times lower, TPOT at most this many times as long, the change outside bursts."""
NEAR = 0.15


@dataclass(frozen=True, slots=True)
class PairClaim:
    """A statement of the paper or a goal, and its measurement."""

    text: str
    find: Callable[[Outcomes], Finding]


def spikes(contender: PairContender, load: float = FIT) -> PairCase:
    """A contender in the window of spikes."""
    return PairCase(contender, replace(SPIKES, rate=load))


PAIRED = spikes(PairContender.PAIRS)


def traced(cases: Sequence[PairCase]) -> list[PairWindow]:
    """The windows of traces among the cases."""
    return list(dict.fromkeys(case.window for case in cases if case.window.folder is not None))


def lower(found: Outcomes, case: PairCase, other: PairContender, place: int = 2) -> float:
    """A percentile of another contender's first tokens, as a multiple of the case's."""
    return figures(found, replace(case, contender=other)).ttft[place] / figures(found, case).ttft[place]


def ttft_beside(other: PairContender, promised: float) -> Callable[[Outcomes], Finding]:
    """The P99 of the first tokens, beside another contender, at the best load."""

    def find(found: Outcomes) -> Finding:
        times = [lower(found, spikes(PairContender.PAIRS, load), other) for load in LOADS]
        each = ", ".join(f"{x:.2f} at {load:g}/s" for x, load in zip(times, LOADS, strict=True))
        return Finding(f"{each} times lower", up_to(max(times), promised))

    return find


def violations_end(found: Outcomes) -> Finding:
    """Violations of five times the median fall to 0.6 % or less at best."""
    cells, held = [], []
    for case in (PAIRED, *(PairCase(PairContender.PAIRS, each) for each in LENGTHS)):
        contenders = (PairContender.VLLM, case.contender)
        before, after = (figures(found, replace(case, contender=each)).late or 0.0 for each in contenders)
        cells.append(f"{case.window.lengths} {share(before)} to {share(after)}")
        held += [after <= 0.0075] if before >= 0.01 else []
    return Finding("; ".join(cells), holds_on(held or [False]))


def tokens_slow_down(found: Outcomes) -> Finding:
    """The time per token is at most 37.5 % longer in the median, 77.4 % in the P99, where pairs pay."""
    pairs, whole = (figures(found, spikes(each)) for each in (PairContender.PAIRS, PairContender.VLLM))
    p50, p99 = pairs.tpot[0] / whole.tpot[0] - 1, pairs.tpot[2] / whole.tpot[2] - 1
    return Finding(f"P50 {share(p50)}, P99 {share(p99)}", holds_on([p50 <= 0.375, p99 <= 0.774]))


def always_costs(found: Outcomes) -> Finding:
    """Always paired: longer first tokens and times per token at light load, and less throughput at a heavy one."""
    always, whole = (figures(found, spikes(each, LOADS[0])) for each in (PairContender.ALWAYS, PairContender.VLLM))
    busy = [figures(found, spikes(each, LOADS[-1])) for each in (PairContender.ALWAYS, PairContender.VLLM)]
    ttft, tpot = always.ttft[0] / whole.ttft[0], always.tpot[0] / whole.tpot[0]
    lost = 1 - busy[0].throughput / busy[1].throughput
    text = f"TTFT {ttft:.2f}, TBT {tpot:.2f} times (P50 at {LOADS[0]:g}/s), throughput -{share(lost)}"
    return Finding(text, holds_on([ttft >= 1.36, tpot >= 1.28]))


def larger_share_gains(found: Outcomes) -> Finding:
    """The larger the parameters' share, the lower the P99: 13.4 to 51.4 times at 56 %."""
    base = figures(found, spikes(PairContender.VLLM, LOADS[-1])).ttft[2]
    times = [base / figures(found, shared(each)).ttft[2] for each in SHARES]
    text = ", ".join(f"{x:.2f} at {share(each, 0)}" for x, each in zip(times, SHARES, strict=True))
    return Finding(f"{text} of memory ({LOADS[-1]:g}/s; the KV of whole replicas is the same)", Verdict.BOUNDED)


def shared(part: float) -> PairCase:
    """Pairs of a model whose parameters take that share, in the heaviest spikes."""
    return replace(spikes(PairContender.PAIRS, LOADS[-1]), share=part)


def exchange(kind: Exchange, gbps: float) -> PairCase:
    """Pairs with a kind of exchange over a link."""
    return replace(PAIRED, exchange=kind, gbps=gbps, predicts=False)


def decode_in_exchange(found: Outcomes, case: PairCase) -> tuple[float, float, float]:
    """The mean and the longest time between tokens, and the mean time, of the exchanges that form groups."""
    runs = found[case]
    steps = [step for run in runs for step in run.steps]
    formed = [each.formed_s - each.began_s for run in runs for each in run.groups if each.formed_s is not None]
    tokens = sum(count for _, _, count in steps)
    spent = sum(seconds * count for _, seconds, count in steps)
    return spent / max(1.0, tokens), max((each[1] for each in steps), default=0.0), mean(formed) if formed else 0.0


def layers_keep_decoding(found: Outcomes) -> Finding:
    """Layer by layer, the mean decode time in an exchange is 51.7 to 79.8 % lower than all at once, on each link."""
    cells, held = [], []
    for gbps in GBPS:
        at_once, in_turn = (decode_in_exchange(found, exchange(e, gbps)) for e in (Exchange.AT_ONCE, Exchange.IN_TURN))
        fall = 1 - in_turn[0] / at_once[0]
        held.append(fall >= 0.517)
        cells.append(f"{gbps:g} Gb/s: -{share(fall, 0)}, {in_turn[2]:.1f} s instead of {at_once[2]:.1f}")
    return Finding("; ".join(cells), holds_on(held))


def restoring_pays(found: Outcomes) -> Finding:
    """Without undoing pairs, the second spike has a P99 37.6 times higher."""
    with_it, without = (figures(found, replace(PAIRED, restores=each)) for each in (True, False))
    times = without.ttft[2] / with_it.ttft[2]
    text = f"P99 {times:.2f} times, P50 {without.ttft[0] / with_it.ttft[0]:.2f} times without"
    return Finding(text, up_to(times, 37.6))


def sized(size: int) -> PairCase:
    """Pairs, or larger groups, of eight replicas."""
    return replace(PAIRED, size=size, count=8, predicts=False)


def small_groups_win(found: Outcomes) -> Finding:
    """Groups of two are best; large ones have a P50 and P99 of the first tokens 1.2 times as long."""
    each = [figures(found, sized(size)) for size in SIZES]
    text = "; ".join(
        f"k = {size}: TTFT {of.ttft[0]:.2f}, {of.ttft[2]:.1f} s, TPOT {of.tpot[0] * 1e3:.0f} ms"
        for size, of in zip(SIZES, each, strict=True)
    )
    return Finding(text, holds_on([each[0].ttft[2] < other.ttft[2] for other in each[1:]]))


def parameters_take_much(found: Outcomes) -> Finding:
    """Parameters are 34 to 65 % of memory: with these models and sums, of the budget."""
    shares = [model.parameters / model.budget for model in MODELS.values()]
    text = ", ".join(f"{name} {share(each, 0)}" for name, each in zip(MODELS, shares, strict=True))
    return Finding(text, holds_on([each >= 0.34 for each in shares]))


# --- Mell's goals ---------------------------------------------------------------------------------------------------


def ten_times(found: Outcomes) -> Finding:
    """Where demand exceeds whole pools and fits pairs, the P99 is 10 times lower at the same bytes."""
    times = [lower(found, PAIRED, PairContender.MOVES, place) for place in range(4)]
    text = ", ".join(f"{each:.1f}" for each in times)
    return Finding(f"p50, p90, p99, p99.9: {text} times lower than with moves alone", up_to(times[2], TTFT_TIMES))


def tokens_keep_pace(found: Outcomes) -> Finding:
    """The time per output token: P50 at most 1.4 times, P99 at most 1.8 times."""
    pairs, whole = (figures(found, spikes(each)) for each in (PairContender.PAIRS, PairContender.MOVES))
    p50, p99 = pairs.tpot[0] / whole.tpot[0], pairs.tpot[2] / whole.tpot[2]
    return Finding(f"P50 {p50:.2f}, P99 {p99:.2f} times", holds_on([p50 <= TPOT_P50, p99 <= TPOT_P99]))


def nothing_outside(found: Outcomes) -> Finding:
    """The medians are within 5 % where nothing exceeds the pools, and where bursts exceed them a little."""
    cells, held = [], []
    for case in (PairCase(PairContender.PAIRS, OTHERS[1]), spikes(PairContender.PAIRS, LOADS[0])):
        pairs, whole = (figures(found, replace(case, contender=each)) for each in (case.contender, PairContender.VLLM))
        changes = [pairs.ttft[0] / whole.ttft[0] - 1, pairs.tpot[0] / whole.tpot[0] - 1]
        held.append(all(abs(each) <= OUTSIDE for each in changes))
        cells.append(f"{case.window.name} {share(changes[0])} TTFT, {share(changes[1])} TPOT (P50)")
    return Finding("; ".join(cells), holds_on(held))


def short_gaps(found: Outcomes) -> Finding:
    """The longest gap between tokens in an exchange, by preemptions and moves, too."""
    gaps = [decode_in_exchange(found, exchange(Exchange.IN_TURN, gbps)) for gbps in GBPS]
    text = ", ".join(f"{1e3 * gap[1]:.0f} ms at {gbps:g} Gb/s" for gap, gbps in zip(gaps, GBPS, strict=True))
    means = ", ".join(f"{1e3 * gap[0]:.0f}" for gap in gaps)
    return Finding(f"longest {text}; on average {means} ms", holds_on([gap[1] <= 0.25 for gap in gaps]))


def predictions_hold(found: Outcomes) -> Finding:
    """The predicted TTFT of the queue's last request is within 15 % of the measured one, in pairs and without."""
    ratios = list(predicted(found))
    if not ratios:
        return Finding("no pair formed", Verdict.NOT)
    text = "; ".join(f"{paired:.2f}, {whole:.2f}" for paired, whole in ratios[:4])
    near = [abs(each - 1) <= NEAR for pair in ratios for each in pair]
    return Finding(f"predicted to measured, in pairs and whole, of the first groups: {text}", holds_on(near))


def predicted(found: Outcomes) -> Iterator[tuple[float, float]]:
    """Predicted over measured waits of the first groups of each run, in pairs and whole: until then both are alike."""
    for load in LOADS:
        pairs, whole = (found[spikes(each, load)] for each in (PairContender.PAIRS, PairContender.MOVES))
        for run, other in zip(pairs, whole, strict=True):
            if run.groups:
                yield _to_measured(run, other)


def _to_measured(run: PairOutcome, other: PairOutcome) -> tuple[float, float]:
    first = run.groups[0]
    measured = (each.waited_s(first.began_s) for each in (run, other))
    foreseen = (first.pairing.paired_s, first.pairing.whole_s)
    paired, whole = (guess / max(0.01, time) for guess, time in zip(foreseen, measured, strict=True))
    return paired, whole


CLAIMS: Sequence[PairClaim] = (
    PairClaim("P99 TTFT up to 8.4 to 27.3 times lower than replication", ttft_beside(PairContender.VLLM, 8.4)),
    PairClaim("... 23.1 to 47.6 times lower than migration", ttft_beside(PairContender.MOVES, 23.1)),
    PairClaim("... 2.9 to 52.2 times lower than always pipelined", ttft_beside(PairContender.ALWAYS, 2.9)),
    PairClaim("SLO violations fall from 32.9 to 0 %, 39.1 to 7.5 %, 27.8 to 0.6 %", violations_end),
    PairClaim("TBT grows by 7.9 to 37.5 % (P50), 33.4 to 77.4 % (P99)", tokens_slow_down),
    PairClaim("always pipelined: TTFT 1.7 to 1.8, TBT 1.6 to 2.0 times; throughput -12.6 to -21.8 %", always_costs),
    PairClaim("70B up to 48.7, 90B 13.4 to 51.4 times (41 and 56 % parameters)", larger_share_gains),
    PairClaim("live exchange: mean decode time -51.7 to -79.8 %, up to 2.4 times as long", layers_keep_decoding),
    PairClaim("without live restore, P99 TTFT 37.6 times higher", restoring_pays),
    PairClaim("smallest groups are best; memory-greedy 1.2 times", small_groups_win),
    PairClaim("parameters take 34 to 65 % of memory", parameters_take_much),
    PairClaim("goal: P99 TTFT 10 times lower where the excess fits pairs", ten_times),
    PairClaim("goal: TPOT P50 at most 1.4 times, P99 at most 1.8 times", tokens_keep_pace),
    PairClaim("goal: outside bursts within 5 %", nothing_outside),
    PairClaim("goal: longest gap of forming 250 ms", short_gaps),
    PairClaim("goal: predictions within 15 %", predictions_hold),
)


def main_cases(windows: Sequence[PairWindow]) -> list[PairCase]:
    """The contenders in the windows of the large table."""
    four = (PairContender.VLLM, PairContender.MOVES, PairContender.ALWAYS, PairContender.PAIRS)
    spiked = [spikes(each, load) for load in LOADS for each in four]
    spiked += [spikes(each) for each in (PairContender.MELL, PairContender.MORE)]
    elsewhere = (PairContender.VLLM, PairContender.PAIRS)
    return spiked + [PairCase(each, window) for window in (*OTHERS, *LENGTHS, *windows) for each in elsewhere]


def varied_cases() -> list[PairCase]:
    """Variants of pairs: shares, sizes, restores, exchanges, models, chunks, long requests."""
    return [
        *map(shared, SHARES),
        *map(sized, SIZES),
        replace(PAIRED, restores=False),
        *(exchange(kind, gbps) for kind in Exchange for gbps in GBPS),
        *SMALL,
        *(replace(spikes(each), chunk=512) for each in (PairContender.VLLM, PairContender.PAIRS)),
        LONG,
    ]


def variant(case: PairCase) -> str:
    """The differences between a case and pairs of the main model, in words."""
    parts = [
        case.model if case.model != MAIN else "",
        f"parameters {share(case.share, 0)}" if case.share is not None else "",
        f"k = {case.size} of {case.count} replicas" if case.count != 4 else "",
        "never undone" if not case.restores else "",
        f"no prediction, {case.exchange}, {case.gbps:g} Gb/s" if not case.predicts else "",
        f"{case.chunk} tokens per step" if case.chunk is not None else "",
        f"every {case.long}th request longer than a replica" if case.long else "",
    ]
    return ", ".join(part for part in parts if part)


def verdicts(found: Outcomes) -> Iterator[tuple[PairClaim, Finding]]:
    """Every claim with its finding."""
    return ((claim, claim.find(found)) for claim in CLAIMS)


def row(found: Outcomes, case: PairCase) -> list[str]:
    """The figures of a case as cells: TTFT, TPOT, gaps, violations, preemptions, moves."""
    of: PairFigures = figures(found, case)
    runs = found[case]
    return [
        ", ".join(f"{each:.2f}" for each in of.ttft),
        ", ".join(f"{each * 1e3:.0f}" for each in of.tpot),
        ", ".join(f"{each * 1e3:.0f}" for each in of.gaps),
        "" if of.late is None else share(of.late),
        f"{mean([run.preemptions for run in runs]):.0f}",
        f"{mean([run.moves for run in runs]):.0f}",
        f"{mean([len(run.groups) for run in runs]):.0f}",
        f"{mean([run.refused for run in runs]):.0f}",
    ]
