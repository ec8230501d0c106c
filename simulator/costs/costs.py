"""The costs of the simulated world in time, room and bandwidth. With `IDEAL`, the paper's model, all are zero.

A cost file (JSON or YAML, where powers of ten are written 1.0e+9) has the fields of `Costs` under their own names.
Missing fields mean no cost; unknown names, wrong types and impossible numbers are errors. Every part can be switched on
by itself.
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

from policies.cost.steps import StepCosts
from simulator.errors import BadInput

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
    """The rule for the path of a migration: always KV, always tokens, or the cheaper one."""

    KV = "kv"
    TOKENS = "tokens"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class ComputeCosts:
    """The time of an engine step, which decodes every running request and prefills a chunk of the queued prompts.

    The formula is in `policies.cost.steps`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    linear: Knots
    """Pairs (tokens computed in the step, seconds) for the part of the time that is independent of the context: weights
    are read once and multiplied with every token. Interpolated linearly between the pairs, constant before the first,
    extrapolated with the last slope."""
    decode: bool = True
    """True: the decode speed follows the formula. False: every request decodes at the set-up's rate."""
    prefill: bool = True
    """True: prefill takes time. False: a request decodes as soon as it has room."""
    interference: bool = True
    """True: prefills prolong the step of the requests that decode in it. False: those requests keep their pace."""
    overhead_s: NotNegative = 0.0
    """Constant seconds per step (scheduling, sampling, launching)."""
    sequence_s: NotNegative = 0.0
    """Seconds per decoding step and request beyond those of its token."""
    context_s: NotNegative = 0.0
    """Seconds per decoding step and token of context: the time to read its KV."""
    attention_s: NotNegative = 0.0
    """Seconds per prefilled token and token before it."""
    chunk_tokens: Count = 2048
    """The most tokens that one step computes, decodes included (vLLM's max_num_batched_tokens)."""
    watermark: Share = 0.0
    """Share of the KV capacity that must stay free when a waiting request is admitted (vLLM's watermark)."""

    @property
    def steps(self) -> StepCosts:
        """The formula of step times with these coefficients."""
        return StepCosts(self.linear, self.overhead_s, self.sequence_s, self.context_s, self.attention_s)


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link, the same in both directions."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    bytes_per_s: Positive
    """Bytes per second and direction."""
    latency_s: NotNegative = 0.0
    """Seconds that a transfer takes beyond its bytes over the bandwidth."""


@dataclass(frozen=True, slots=True)
class MigrationCosts:
    """The costs of migrations."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    intra: LinkCosts
    """Links within a node: the port of each replica."""
    inter: LinkCosts
    """Links between nodes: the uplink of each node, shared by its replicas. A transfer uses the ports, too."""
    kv_bytes: Annotated[int, Field(ge=1)]
    """Bytes of KV per token, over all layers."""
    path: PathChoice = PathChoice.ADAPTIVE
    """Always KV, always tokens, or a choice by links and prefill budgets (the paper's section V)."""
    consensus: bool = True
    """True: one planner decides for the whole cluster. False: each source decides alone."""
    precopy: bool = True
    """True: a request decodes on while its full blocks are copied. False: it stops until the copy is done."""
    block_tokens: Count = 16
    """Tokens per KV block; only full blocks are copied."""
    handover_s: NotNegative = 0.0
    """Seconds of a hand-over, in which neither side works on the request."""
    time_limit_s: Positive = 10.0
    """The communication boundary: the longest queue of transfers on a link, in seconds, with the adaptive choice."""
    slowdown: Positive = 0.2
    """The computation boundary: the share of a replica's time for migrated prefills, with the adaptive choice."""


@dataclass(frozen=True, slots=True)
class Costs:
    """All differences between the simulated world and the paper's idealised one."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str = "ideal"
    """The name of the modelled system."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """The origin of each figure: measured, scaled or assumed."""
    slots: bool = True
    """True: time is in slots of one epoch, as in the paper. Arrivals are reported at the end of their slot, a request
    occupies its last slot in full, and memory may be exceeded until the slot's decision. False: arrivals are placed at
    once, and a replica's memory is never exceeded."""
    preemption: bool = True
    """True: a replica whose requests exceed its memory preempts the youngest. False: it keeps serving all."""
    startup_s: NotNegative = 0.0
    """Seconds from opening a replica until it takes requests."""
    compute: ComputeCosts | None = None
    """The times of engine steps. None: every request decodes at the set-up's rate, and prefill is instantaneous."""
    migration: MigrationCosts | None = None
    """The costs of migrations. None: moves are instantaneous."""
    ingress_s: NotNegative = 0.0
    """Seconds from a request's arrival to its first token that do not depend on its engine: HTTP, tokenizing, placing,
    and the ways to the replica and back. Counted before the placement."""


IDEAL = Costs()
"""The paper's idealised model (section VI-A): time in slots, a fixed decode rate, moves and starts at once."""

SHIPPED = Path(__file__).parents[1] / "cost_files"
"""The cost files that come with the simulator."""

SHIPPED_SYSTEMS: Mapping[str, str] = {
    "a100-40g-13b-pcie": "Llama 2 13B on an NVIDIA A100 with 40 GB, links by PCIe",
    "a100-80g-14b-200gb": "Qwen 2.5 14B on an NVIDIA A100 of 80 GB, links of 200 Gb/s",
    "h100-8b-nvlink": "Llama 3 8B on an NVIDIA H100, links by NVLink",
    "rtx4090-7b-pcie": "Llama 2 7B on an NVIDIA RTX 4090, links by PCIe",
}
"""The model and the GPU of every shipped cost file."""

_COSTS = TypeAdapter(Costs)


def read_costs(source: str) -> Costs:
    """The costs in a file, given by its path or by the name of a shipped one; `ideal` is `IDEAL`.

    Raises `BadInput` if there is no such file, or if its content is not valid.
    """
    if source == "ideal":
        return IDEAL
    shipped = SHIPPED / f"{source}.json"
    path = shipped if shipped.is_file() else Path(source)
    try:
        text = path.read_text(encoding="utf-8")
        # YAML is converted to JSON, so that both accept the same values.
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
    """The mistakes in a file, each with its location."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = (f"{'.'.join(str(part) for part in e['loc']) or 'file'}: {e['msg']}" for e in error.errors())
    return "; ".join(problems)
