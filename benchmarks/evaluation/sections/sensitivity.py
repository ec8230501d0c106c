"""The sensitivity of the outcome under real costs, and the cases in which migration does not pay."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes

from benchmarks.evaluation.plots import PlottedCurve, curves
from benchmarks.evaluation.runs.case import Case, Physics, Recording, seeds
from benchmarks.evaluation.runs.eight import A100, MIDDLE, OURS
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import MARKERS, PALE, Pictures, colour, drawing, legend
from benchmarks.evaluation.style import name as name_of
from benchmarks.evaluation.words import change, table
from simulator.workload.workload import Poisson

RATE = 0.8
FIXED = ("best_fit", "worst_fit")
MIGRATING = ("load_balance", OURS)
EVERYONE = (*FIXED, *MIGRATING)
DELAY = "added_completion_s.p99"
PANELS = (("gpu_seconds", "GPU-seconds"), (DELAY, "p99 delay"))
COLUMNS = 4
TOLERANCE = 1.05
"""The factor up to which a p99 counts as equal to another one: the p99 of some hundred requests is noisy."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A run with one changed parameter."""

    label: str
    case: Case


@dataclass(frozen=True, slots=True)
class Dimension:
    """The variants of one parameter, with everything else as in the base."""

    name: str
    variants: tuple[Variant, ...]


def base(scale: Scale) -> Case:
    """The base of all variants: 13B, the middle Poisson rate, the unchanged cost file."""
    return Case(OURS, MIDDLE.arrivals, scale.varied, A100.capacity, Physics(A100.costs))


def dimensions(scale: Scale) -> list[Dimension]:
    """All varied parameters; the base is among the variants of each."""
    whole = base(scale)

    def poisson(rate: float, length_scale: float = 10.0) -> Case:
        return replace(whole, arrivals=Poisson(rate), length_scale=length_scale)

    def recorded(file: str) -> Case:
        return replace(whole, arrivals=Recording(file, RATE))

    def slowed(factor: float) -> Case:
        return replace(whole, physics=replace(whole.physics, slowness=factor))

    def varied(name: str, *variants: tuple[str, Case]) -> Dimension:
        return Dimension(name, tuple(Variant(label, case) for label, case in variants))

    return [
        varied("requests per second", *((f"{rate:g}", poisson(rate)) for rate in (0.2, 0.5, RATE, 1.1))),
        varied("length scale, at equal load", *((f"x {s:g}", poisson(RATE * 10 / s, s)) for s in (5.0, 10.0, 20.0))),
        varied(
            "arrivals, at equal mean rate",
            ("Poisson", whole),
            ("conv", recorded("azure2023_conv.csv.gz")),
            ("code", recorded("azure2023_code.csv.gz")),
            ("Mooncake", recorded("mooncake_conversation.csv.gz")),
            ("burst", recorded("burstgpt_like_1400s.csv.gz")),
        ),
        varied("engine steps take", *((f"x {slow:g}", slowed(slow)) for slow in (0.5, 1.0, 2.0))),
        varied("epoch (s)", *((f"{s:g}", replace(whole, epoch_s=s)) for s in (0.5, 1.0, 2.0, 5.0))),
        varied("Gb/s between machines", *((f"{g:g}", _linked(whole, g)) for g in (1.0, 10.0, 100.0))),
        varied("start-up (s)", *((f"{s:g}", _starting(whole, s)) for s in (0.0, 30.0, 120.0))),
    ]


def _linked(whole: Case, gbits: float) -> Case:
    """The base with another link speed; 10 Gb/s is the cost file's."""
    changed = None if gbits == 10 else gbits * 1e9 / 8
    return replace(whole, physics=replace(whole.physics, inter_bytes_per_s=changed))


def _starting(whole: Case, seconds: float) -> Case:
    """The base with another start-up time; 30 s is the cost file's."""
    return replace(whole, physics=replace(whole.physics, startup_s=None if seconds == 30 else seconds))


def runs(variant: Variant, policy: str, scale: Scale) -> list[Case]:
    """The runs of a variant with a policy, one per seed."""
    return seeds(replace(variant.case, policy=policy), scale.costly_seeds)


def _cases(scale: Scale) -> list[Case]:
    return [
        case
        for dimension in dimensions(scale)
        for variant in dimension.variants
        for policy in EVERYONE
        for case in runs(variant, policy, scale)
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our policy in one variant, against the cheapest policy without migration that is as fast.

    If none is as fast, the comparison is against the fastest of them. `saved` is a share of GPU-seconds; delays are p99
    of added completion time in seconds.
    """

    label: str
    against: str
    saved: float
    delay: float
    other_delay: float

    @property
    def pays(self) -> bool:
        """True if our policy takes fewer GPU-seconds."""
        return self.saved > 0


def compared(results: Results, variant: Variant, scale: Scale) -> Comparison:
    """Compare our policy with those without migration."""

    def value(policy: str, metric: str) -> float:
        return results.mean(runs(variant, policy, scale), metric)

    delay = value(OURS, DELAY)
    fast = [policy for policy in FIXED if value(policy, DELAY) <= TOLERANCE * delay]
    if fast:
        against = min(fast, key=lambda policy: value(policy, "gpu_seconds"))
    else:
        against = min(FIXED, key=lambda policy: value(policy, DELAY))
    saved = 1 - value(OURS, "gpu_seconds") / value(against, "gpu_seconds")
    return Comparison(variant.label, against, saved, delay, value(against, DELAY))


def _parts(results: Results, scale: Scale, pictures: Pictures) -> dict[str, str]:
    varied = dimensions(scale)
    header = ("varied", "", *(f"`{policy}`" for policy in EVERYONE), "against", "saved", "delay ratio", "pays")
    return {
        "sensitivity-figure": _figure(results, varied, scale, pictures),
        "sensitivity": table(header, _rows(results, varied, scale)),
    }


def _figure(results: Results, varied: Sequence[Dimension], scale: Scale, pictures: Pictures) -> str:
    """Draw two rows of panels, GPU-seconds above and delay below, for every `COLUMNS` dimensions."""
    rows = len(PANELS) * -(-len(varied) // COLUMNS)
    with drawing(COLUMNS, rows, width=11, height=2.1) as (figure, axes):
        for each in axes:
            each.set_axis_off()
        for row, (metric, label) in enumerate(PANELS):
            panels = [axes[_place(number, row)] for number in range(len(varied))]
            for each, dimension in zip(panels, varied, strict=True):
                _panel(each, results, dimension, scale, metric)
                each.set_title(dimension.name if row == 0 else "")
            low, high = (choose(each.get_ylim()[end] for each in panels) for end, choose in ((0, min), (1, max)))
            for each in panels:
                each.set_ylim(low, high)
            for each in panels[::COLUMNS]:
                each.set_ylabel(label)
        legend(figure, axes[0], 4)
        return pictures.save(
            figure,
            "sensitivity",
            "GPU-seconds and p99 delay under real costs, as ratios to the cheapest without migration that is as fast",
        )


def _place(number: int, row: int) -> int:
    """The index of a dimension's panel among all axes."""
    block, column = divmod(number, COLUMNS)
    return (len(PANELS) * block + row) * COLUMNS + column


def _panel(axes: Axes, results: Results, dimension: Dimension, scale: Scale, metric: str) -> None:
    axes.set_axis_on()
    axes.axhline(1, color=PALE, linewidth=1)
    curves(axes, [_curve(results, dimension, scale, policy, metric) for policy in EVERYONE])
    axes.set_xticks(range(len(dimension.variants)), [variant.label for variant in dimension.variants])
    axes.tick_params(axis="x", labelrotation=20 if len(dimension.variants) > COLUMNS else 0)
    axes.margins(x=0.12)


def _curve(results: Results, dimension: Dimension, scale: Scale, policy: str, metric: str) -> PlottedCurve:
    ratios = []
    for variant in dimension.variants:
        against = compared(results, variant, scale).against
        ours, theirs = (results.mean(runs(variant, each, scale), metric) for each in (policy, against))
        ratios.append(ours / theirs if theirs else 1.0)
    return PlottedCurve(policy, colour(policy), range(len(ratios)), ratios, marker=MARKERS[name_of(policy)])


def _rows(results: Results, varied: Sequence[Dimension], scale: Scale) -> Iterator[list[str]]:
    for dimension in varied:
        for number, variant in enumerate(dimension.variants):
            found = compared(results, variant, scale)
            cells = [_cell(results, runs(variant, policy, scale)) for policy in EVERYONE]
            ratio = f"{found.delay / found.other_delay:.2f}" if found.other_delay else "-"
            first = dimension.name if number == 0 else ""
            pays = "yes" if found.pays else "no"
            yield [first, variant.label, *cells, f"`{found.against}`", change(found.saved), ratio, pays]


def _cell(results: Results, cases: Sequence[Case]) -> str:
    return f"{results.mean(cases, 'gpu_seconds') / 1000:.1f}, {results.mean(cases, DELAY):.0f}"


SECTION = PageSection(_cases, _parts)
