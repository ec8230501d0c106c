"""Corrects costs by measurements of a live system.

The measurements are in a JSON file. Every part is optional:

    {"prefill":   [{"tokens": 512, "seconds": 0.071}, ...],
     "decode":    [{"requests": 8, "context_tokens": 9600, "seconds": 0.031}, ...],
     "links":     [{"scope": "intra", "bytes": 134217728, "seconds": 0.0061}, ...],
     "startup_s": [31.5, 29.8, ...]}

`prefill`: a request of `tokens` tokens on an idle replica, from its admission to its first token. `decode`: one step of
a replica that decodes `requests` requests with `context_tokens` tokens of context in total. `links`: one transfer
between two replicas of a node (`intra`) or of two nodes (`inter`). `startup_s`: from the order for a replica until it
took requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from simulator.costs.costs import STRICT, ComputeCosts, Costs, Count, LinkCosts, NotNegative, Positive, sentence
from simulator.costs.fits import Timing, brief, fit_link, rising, slope
from simulator.errors import BadInput


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """The measured time of a prompt."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    tokens: Count
    seconds: Positive


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """The measured time of a step without prefills."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    requests: Count
    context_tokens: Count
    seconds: Positive


@dataclass(frozen=True, slots=True)
class TransferTime:
    """The measured time of a transfer."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    scope: Literal["intra", "inter"]
    bytes: Count
    seconds: Positive


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of a live system; a part without measurements is empty."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    prefill: tuple[PrefillTime, ...] = ()
    decode: tuple[DecodeTime, ...] = ()
    links: tuple[TransferTime, ...] = ()
    startup_s: tuple[NotNegative, ...] = ()


_MEASUREMENTS = TypeAdapter(Measurements)


def calibrated(costs: Costs, path: Path) -> Costs:
    """The costs, corrected by the measurements in a file.

    Raises `BadInput` if the file cannot be read, is not valid, or has measurements for a part that `costs` lack.
    """
    try:
        measured = _MEASUREMENTS.validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"Cannot read the measurements in {path}: {error.strerror}.") from None
    except ValidationError as error:
        raise BadInput(f"The measurements in {path} are wrong: {sentence(error)}.") from None
    try:
        return overlay(costs, measured)
    except ValueError as error:
        raise BadInput(f"The measurements in {path} cannot be used: {error}.") from None


def overlay(costs: Costs, measured: Measurements) -> Costs:
    """The costs, corrected by measurements. Raises `ValueError` for measurements of a part that the costs lack."""
    if measured.startup_s:
        costs = replace(costs, startup_s=median(measured.startup_s))
    if measured.prefill or measured.decode:
        if costs.compute is None:
            raise ValueError("these costs have no step times to correct")
        costs = replace(costs, compute=_compute(costs.compute, measured))
    if measured.links:
        if costs.migration is None:
            raise ValueError("these costs have no links to correct")
        intra = _link(costs.migration.intra, measured.links, "intra")
        inter = _link(costs.migration.inter, measured.links, "inter")
        costs = replace(costs, migration=replace(costs.migration, intra=intra, inter=inter))
    return costs


def _compute(costs: ComputeCosts, measured: Measurements) -> ComputeCosts:
    """Step times through the measured points, and unchanged outside of their range.

    The time per token of context comes first, from steps with equal numbers of requests. Prompts longer than one step
    are left out, since their time is not that of a single step.
    """
    context_s = _context_s(measured.decode)
    if context_s is None:
        context_s = costs.context_s
    rest = replace(costs.steps, linear=((1, 0.0),), context_s=context_s)
    linear: dict[int, list[float]] = {}
    for prompt in measured.prefill:
        if prompt.tokens <= costs.chunk_tokens:
            linear.setdefault(prompt.tokens, []).append(prompt.seconds - rest.prefill_s(prompt.tokens))
    if measured.prefill and not linear:
        raise ValueError(f"no prompt of at most {costs.chunk_tokens} tokens was measured")
    fewest, most = min(linear, default=math.inf), max((step.requests for step in measured.decode), default=0)
    for step in measured.decode:
        if step.requests < fewest:
            seconds = step.seconds - rest.step_s(step.requests, step.context_tokens)
            linear.setdefault(step.requests, []).append(seconds)
    linear |= {tokens: [seconds] for tokens, seconds in costs.linear if most < tokens < fewest}
    knots = rising({tokens: brief(median(seconds)) for tokens, seconds in linear.items()})
    if knots[0][1] <= 0:
        raise ValueError("the measured steps take less than their overhead")
    return replace(costs, linear=knots, context_s=brief(context_s))


def _context_s(steps: Sequence[DecodeTime]) -> float | None:
    """Seconds per token of context; None unless two steps with equal numbers of requests differ in context."""
    batches = {step.requests for step in steps}
    slopes = [
        slope([(step.context_tokens, step.seconds) for step in steps if step.requests == batch])
        for batch in sorted(batches)
    ]
    found = [value for value in slopes if value is not None]
    return max(0.0, median(found)) if found else None


def _link(costs: LinkCosts, transfers: Sequence[TransferTime], scope: str) -> LinkCosts:
    timings = [Timing(t.bytes, t.seconds) for t in transfers if t.scope == scope]
    return fit_link(timings) if timings else costs
