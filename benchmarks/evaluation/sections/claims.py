"""The paper's claims one by one: our number beside each, and the verdict by rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.eight import (
    AZURE,
    BASELINES,
    HARDWARE,
    HIGH,
    LOW,
    PAPERS,
    WORKLOADS,
    every,
    runs,
    saving,
    savings,
)
from benchmarks.evaluation.runs.perform import PROMISED_MOVES
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.sections import batching, held
from benchmarks.evaluation.style import Pictures
from benchmarks.evaluation.words import change, share, span, text_table

NEARLY = 0.8
PARTLY = 0.4
"""The shares of the promised value from which on a claim "up to" reproduces, and reproduces partly."""


class Verdict(StrEnum):
    """The verdict on a claim."""

    REPRODUCES = "reproduces"
    PARTLY = "partly"
    NOT = "does not"
    BOUNDED = "bounded"
    """The simulator has only a part of what the claim is about, and shows how far that part goes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Our number as text, and the verdict that follows from it."""

    number: str
    verdict: Verdict

    @property
    def cell(self) -> str:
        """The finding in a table of the page."""
        return f"**{self.verdict}**: {self.number}"


def holds_on(held: Sequence[bool]) -> Verdict:
    """The verdict on a claim about every workload. Raises `ValueError` if there are no workloads."""
    if not held:
        raise ValueError("a claim about no workloads can be neither true nor false")
    if all(held):
        return Verdict.REPRODUCES
    return Verdict.PARTLY if any(held) else Verdict.NOT


def up_to(best: float, promised: float) -> Verdict:
    """The verdict on a claim that a metric reaches `promised` at best."""
    if best >= NEARLY * promised:
        return Verdict.REPRODUCES
    return Verdict.PARTLY if best >= PARTLY * promised else Verdict.NOT


def within(most: float, limit: float) -> Verdict:
    """The verdict on a claim that a metric never exceeds a limit."""
    return Verdict.REPRODUCES if most <= limit else Verdict.NOT


CONSTANT = 4.0
"""The additive constant of Theorem 2, which the paper leaves open: one GPU of each category."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper, its place there, and the measurement of a policy against it."""

    text: str
    where: str
    find: Callable[[Results, Scale, str], Finding]


# --- what was found -------------------------------------------------------------------------------------------------


def fewer_gpus(results: Results, scale: Scale, policy: str) -> Finding:
    """9 to 31 % fewer GPUs than the existing systems."""
    found = [each for other in BASELINES for each in savings(results, scale, policy, other)]
    return Finding(span(found), holds_on([each >= 0.09 for each in found]))


def better_used(results: Results, scale: Scale, policy: str) -> Finding:
    """10 to 43 % more utilisation, relative."""
    found = [-each for other in BASELINES for each in savings(results, scale, policy, other, "utilisation")]
    return Finding(span(found), holds_on([each >= 0.10 for each in found]))


def fewer_than_balanced(results: Results, scale: Scale, policy: str) -> Finding:
    """Up to 15 % fewer GPUs than LB."""
    best = max(savings(results, scale, policy, "load_balance"))
    return Finding(f"up to {share(best)}", up_to(best, 0.15))


def fewer_than_fits(results: Results, scale: Scale, policy: str) -> Finding:
    """Over 20 % fewer GPUs than BF and WF: the one against which it saves less decides."""
    best, worst = (max(savings(results, scale, policy, other)) for other in ("best_fit", "worst_fit"))
    return Finding(f"up to {share(best)} (BF), {share(worst)} (WF)", up_to(min(best, worst), 0.20))


def grows_with_load(results: Results, scale: Scale, policy: str) -> Finding:
    """The advantage over LB is larger with frequent arrivals than with infrequent ones."""
    ends = [
        [saving(results, scale, (hardware, load), policy, "load_balance") for load in (LOW, HIGH)]
        for hardware in HARDWARE
    ]
    number = "; ".join(
        f"{h.short} {share(low)} to {share(high)}" for h, (low, high) in zip(HARDWARE, ends, strict=True)
    )
    return Finding(number, holds_on([high > low for low, high in ends]))


def moves_less(results: Results, scale: Scale, policy: str) -> Finding:
    """Fewer migrations than LB, consistently."""
    found = savings(results, scale, policy, "load_balance", "migrations_per_s")
    ratios = [1 - each for each in found]
    return Finding(f"{min(ratios):.1f} to {max(ratios):.1f} times LB's", holds_on([each > 0 for each in found]))


def ten_moves(results: Results, scale: Scale, policy: str) -> Finding:
    """At most ten migrations per operation; a multi-item counts as one."""
    cases = [batching.pair(workload, policy, scale)[0] for workload in WORKLOADS]
    most = results.most(cases, "operations.most_units")
    beyond, count = (sum(results.value(case, f"operations.{n}") for case in cases) for n in ("beyond_promise", "count"))
    return Finding(
        f"at most {most:.0f}; {beyond:,.0f} of {count:,.0f} operations exceed ten", within(most, PROMISED_MOVES)
    )


def well_used(results: Results, scale: Scale, policy: str) -> Finding:
    """A utilisation of 88 % or more on every workload."""
    found = [results.mean(runs(workload, policy, scale), "utilisation") for workload in WORKLOADS]
    return Finding(f"{share(min(found))} at the lowest", holds_on([each >= 0.88 for each in found]))


def batched(results: Results, scale: Scale, policy: str) -> Finding:
    """Batching saves up to 30 % of migrations with Poisson arrivals, up to 25 % with Azure's: the worse decides."""
    saved = {w: batching.fewer(results, w, policy, scale) for w in WORKLOADS}
    azure = max(each for (_, load), each in saved.items() if load == AZURE)
    poisson = max(each for (_, load), each in saved.items() if load != AZURE)
    return Finding(
        f"at best {change(-poisson)} (Poisson), {change(-azure)} (Azure)", up_to(min(poisson / 0.30, azure / 0.25), 1.0)
    )


def holds_more(results: Results, scale: Scale, policy: str) -> Finding:
    """23 to 60 % more requests held by a fixed number of GPUs."""
    found = held.gains(results, scale, policy)
    return Finding(span(found, 0), holds_on([each >= 0.23 for each in found]))


def competitive(results: Results, scale: Scale, policy: str) -> Finding:
    """Never more GPUs than 4/3 of the optimum and a constant; L2 is no more than the optimum."""
    cases = [case for workload in WORKLOADS for case in runs(workload, policy, scale)]
    most = results.most(cases, "most_above_ratio")
    worst = max(results.value(case, "gpus_peak") / results.value(case, "bound_peak") for case in cases)
    number = f"peak to peak at most {worst:.2f}; in no epoch more than {most:.1f} GPUs above 4/3 L2"
    return Finding(number, within(most, CONSTANT))


CLAIMS: Sequence[Claim] = (
    Claim("9 to 31 % fewer GPUs than existing systems", "abstract", fewer_gpus),
    Claim("10 to 43 % higher GPU utilisation", "abstract", better_used),
    Claim("up to 15 % fewer GPUs than LB", "VIII-C", fewer_than_balanced),
    Claim("over 20 % fewer GPUs than BF and WF", "VIII-C", fewer_than_fits),
    Claim("the advantage grows with the arrival rate", "VIII-C", grows_with_load),
    Claim("fewer migrations than LB, consistently", "VIII-C", moves_less),
    Claim("at most ten migrations per operation", "Theorem 3", ten_moves),
    Claim("utilisation of 88 % at the lowest", "VIII-C", well_used),
    Claim("batching saves up to 30 % (Poisson), 25 % (Azure)", "VIII-C", batched),
    Claim("migration holds 23 to 60 % more requests", "III, Fig. 6", holds_more),
    Claim("competitive ratio of 4/3", "Theorem 2", competitive),
)


def _cases(scale: Scale) -> list[Case]:
    return [
        *every((*BASELINES, *PAPERS), scale),
        *batching.SECTION.cases(scale),
        *held.SECTION.cases(scale),
    ]


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    rows = [
        [claim.text, claim.where, *(claim.find(results, scale, policy).cell for policy in PAPERS)] for claim in CLAIMS
    ]
    return {"claims": text_table(("claim", "where", *(f"`{policy}`" for policy in PAPERS)), rows)}


SECTION = PageSection(_cases, _parts)
