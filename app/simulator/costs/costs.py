"""What takes time, room or bandwidth in the simulated world. With `IDEAL` nothing does: the paper's model.

A cost file (JSON or YAML, where powers of ten are written 1.0e+9) has the fields of `Costs` under their own names.
What it leaves out costs nothing; names that do not exist, wrong types and impossible numbers are errors. Every part can
be switched on alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar

import yaml
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from app.simulator.errors import BadInput

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


def _rising(knots: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(knots)):
        raise ValueError("tokens must rise from pair to pair, and seconds must not fall")
    return knots


Knots = Annotated[tuple[tuple[Count, Positive], ...], Field(min_length=1), AfterValidator(_rising)]


class PathChoice(StrEnum):
    """How it is decided what a migration sends."""

    KV = "kv"
    TOKENS = "tokens"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class ComputeCosts:
    """What an engine step takes: a decode of every running request, and a chunk of the prefills that are queued.

    A step that decodes B requests with T tokens of context in all and prefills p more tokens takes
    overhead + linear(B + p) + context * T + attention * (p times the tokens before each of them).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    linear: Knots
    """Pairs (tokens computed in the step, seconds) for all that does not depend on context: weights are read once
    and multiplied with every token. Straight lines between the pairs, flat before the first; the last slope goes on."""
    decode: bool = True
    """Whether decode speed follows the formula; if not, every request decodes at the set-up's rate."""
    prefill: bool = True
    """Whether prefill takes time; if not, a request decodes as soon as it has room."""
    interference: bool = True
    """Whether a step that prefills takes longer for the requests that decode in it; if not, they do not notice."""
    overhead_s: NotNegative = 0.0
    """Seconds that every step takes besides (scheduling, sampling, launching)."""
    context_s: NotNegative = 0.0
    """Seconds per decoding step and token of context: the time to read its KV."""
    attention_s: NotNegative = 0.0
    """Seconds per prefilled token and token before it."""
    chunk_tokens: Count = 2048
    """Tokens that one step computes at most, decodes included (vLLM's max_num_batched_tokens)."""
    watermark: Share = 0.0
    """Share of the KV capacity that must stay free when a waiting request is admitted (vLLM's watermark)."""


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link, the same in both directions."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    bytes_per_s: Positive
    """Bytes per second and direction."""
    latency_s: NotNegative = 0.0
    """Seconds until the last byte of a transfer has arrived, beyond what the bandwidth takes."""


@dataclass(frozen=True, slots=True)
class MigrationCosts:
    """What moving a request takes. Without it moves are instantaneous, KV and all."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    intra: LinkCosts
    """Between two replicas of a node: the port of each replica."""
    inter: LinkCosts
    """Between nodes: the uplink of each node, shared by its replicas. Their ports are used as well."""
    kv_bytes: Annotated[int, Field(ge=1)]
    """Bytes of KV per token, over all layers."""
    path: PathChoice = PathChoice.ADAPTIVE
    """What is sent: always KV, always tokens, or what fits links and prefill budgets (the paper's section V)."""
    consensus: bool = True
    """Whether one planner decides for the whole cluster; if not, each source decides alone."""
    precopy: bool = True
    """Whether a request decodes on while its full blocks are copied; if not, it stops until the copy is done."""
    block_tokens: Count = 16
    """Tokens per KV block; only full blocks are copied."""
    handover_s: NotNegative = 0.0
    """Seconds in which neither side works on a request that is handed over."""
    time_limit_s: Positive = 10.0
    """The communication boundary: seconds of transfers that the adaptive choice lets queue on a link."""
    slowdown: Positive = 0.2
    """The computation boundary: share of a replica's time that the adaptive choice spends on migrated prefills."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything that makes the simulated world differ from the paper's idealised one."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str = "ideal"
    """What the costs are those of."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Where each figure is from: measured, scaled or assumed."""
    slots: bool = True
    """Whether time is in slots of one epoch, as in the paper: arrivals are told at the end of their slot, a request
    occupies its last slot in full, and memory may be exceeded until the slot's decision. Otherwise arrivals are placed
    at once and a replica's memory is exceeded at no time."""
    preemption: bool = True
    """Whether a replica whose requests exceed its memory stops the youngest of them; if not, it keeps serving."""
    startup_s: NotNegative = 0.0
    """Seconds from opening a replica until it takes requests."""
    compute: ComputeCosts | None = None
    """What engine steps take; without it every request decodes at the set-up's rate, and prefill is instantaneous."""
    migration: MigrationCosts | None = None
    """What moving a request takes; without it moves are instantaneous."""


IDEAL = Costs()
"""The paper's idealised model (section VI-A): time in slots, a fixed decode rate, moves and starts at once."""

SHIPPED = Path(__file__).parents[1] / "cost_files"
"""The cost files that come with the simulator."""

_COSTS = TypeAdapter(Costs)


def read_costs(source: str) -> Costs:
    """The costs in a file, or in the one of that name that comes with the simulator; `ideal` is `IDEAL`.

    Raises `BadInput` if there is none, or if it does not hold costs.
    """
    if source == "ideal":
        return IDEAL
    shipped = SHIPPED / f"{source}.json"
    path = shipped if shipped.is_file() else Path(source)
    try:
        text = path.read_text(encoding="utf-8")
        # YAML goes through JSON: then the same values are accepted in both.
        return _COSTS.validate_json(text if path.suffix == ".json" else json.dumps(yaml.safe_load(text)))
    except OSError as error:
        names = ", ".join(["ideal", *shipped_costs()])
        raise BadInput(f"Cannot read the costs in {path}: {error.strerror}. By name there are {names}.") from None
    except (ValidationError, yaml.YAMLError, TypeError, ValueError) as error:
        raise BadInput(f"The costs in {path} are wrong: {sentence(error)}") from None


def write_costs(costs: Costs, path: Path) -> None:
    """Write a cost file that `read_costs` reads."""
    path.write_bytes(_COSTS.dump_json(costs, indent=2) + b"\n")


def shipped_costs() -> list[str]:
    """The names of the cost files that come with the simulator."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def sentence(error: Exception) -> str:
    """What is wrong with a file, and where in it."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = (f"{'.'.join(str(part) for part in e['loc']) or 'file'}: {e['msg']}" for e in error.errors())
    return "; ".join(problems)
