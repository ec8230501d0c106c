"""Limits of the simulation."""

from benchmarks.evaluation.runs.case import Case
from benchmarks.evaluation.runs.results import Results
from benchmarks.evaluation.runs.scale import Scale
from benchmarks.evaluation.section import PageSection
from benchmarks.evaluation.style import Pictures
from benchmarks.evaluation.words import bullets

LIMITS = (
    "Lengths are drawn from quantiles, prompts and outputs independently of each other; in real conversations they "
    "hang together. The table ends at the 99th percentile; ten times that exceeds a GPU and is cut anyway.",
    "The paper scales conversations by ten and does not say what becomes of those that then exceed a GPU. Cutting them "
    "is our reading; it makes many requests of just one GPU's size.",
    "Azure's trace is used for its arrival times only, as in the paper.",
    "In the idealised model evictions cost nothing, so policies that evict look better there than anywhere else.",
    "Real costs are modelled, not run: engine steps follow a formula fitted to published profiles, scaled to other "
    "models and GPUs where there was none; links have a bandwidth and a latency, and no congestion by others. The cost "
    "files say what is measured and what is assumed. `--calibration` corrects them with what a live system measured "
    "of itself.",
    "Prefix caches, speculative decoding, failures, and several models on one cluster are not simulated.",
    "p99 of runs under real costs rests on some hundred requests each: differences of a few per cent mean nothing.",
    "The lower bound forgets where requests are: no policy that moves requests one at a time can be expected to "
    "reach it.",
)


def _cases(scale: Scale) -> list[Case]:
    return []


def _write(results: Results, scale: Scale, pictures: Pictures) -> str:
    return bullets(LIMITS)


SECTION = PageSection("Limits of this simulation", _cases, _write)
