"""The file of models: the sizes of each, its times and its level, and the budget of a device."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes, PoolId, Tokens
from simulator.costs.costs import STRICT, Costs, NotNegative, Positive, read_costs, sentence
from simulator.errors import BadInput

MIB = 1 << 20
BLOCK_TOKENS = 16
"""Tokens of a KV block, as in vLLM."""

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the file."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: Annotated[str, Field(min_length=1)]
    """Its name in the trace."""
    costs: str
    """A cost file with step times, bytes of KV per token and the start-up time, or the name of a shipped one."""
    parameters_mib: Positive
    """Its parameters on a device."""
    max_model_len: Annotated[int, Field(ge=8)]
    """The tokens of its longest request, prompt and output: the floor of its KV memory."""
    wake_s: Positive
    """Seconds from an order to wake to a replica that runs."""
    fixed_mib: NotNegative = 0.0
    """Memory of a replica that is awake, beside parameters and KV: context, graphs, activations."""
    asleep_mib: NotNegative = 0.0
    """Memory on the device of a replica that sleeps."""
    startup_s: Positive | None = None
    """Seconds of a start; None: those of the costs."""
    weight: Positive = 1.0
    """Its share in the division of memory."""
    min_replicas: Count = 0
    """Replicas that are always awake."""
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    """The most replicas; None: no limit."""
    ttft_p99_s: Positive | None = None
    """Its level: 99 % of first tokens within that time; None: the level of the plan."""


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The models, and the devices that they share."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    budget_mib: Positive
    """Memory of a device for all that the models hold on it."""
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)]
    sleep_s: NotNegative = 0.0
    """Seconds in which a replica falls asleep."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model with its costs, checked. `capacity` are the tokens of KV of a replica alone on a device."""

    entry: ModelEntry
    costs: Costs
    memory: ModelMemory
    capacity: Tokens
    ttft_p99_s: float

    @property
    def pool(self) -> PoolId:
        """Its pool."""
        return PoolId(self.entry.name)

    @property
    def startup_s(self) -> float:
        """Seconds of a start."""
        return self.costs.startup_s


_FILE = TypeAdapter(ModelsFile)


def read_models(path: Path) -> ModelsFile:
    """The models in a file. Raises `BadInput` if it cannot be read, or if its content is not valid."""
    try:
        text = path.read_text(encoding="utf-8")
        file = _FILE.validate_json(json.dumps(yaml.safe_load(text)))
    except OSError as error:
        raise BadInput(f"Cannot read the models in {path}: {error.strerror}.") from None
    except (ValidationError, yaml.YAMLError, TypeError, ValueError) as error:
        raise BadInput(f"The models in {path} are wrong: {sentence(error)}.") from None
    twice = [name for name, count in Counter(entry.name for entry in file.models).items() if count > 1]
    if twice:
        raise BadInput(f"The models in {path} are wrong: there are several with the name {twice[0]}.")
    for entry in file.models:
        if entry.max_replicas is not None and entry.max_replicas < entry.min_replicas:
            raise BadInput(
                f"{entry.name}: max_replicas {entry.max_replicas} is below min_replicas {entry.min_replicas}."
            )
    return file


def planned_models(file: ModelsFile, ttft_p99_s: float | None) -> list[PlannedModel]:
    """The models with their costs, and with this level unless they have their own.

    Raises `BadInput` for costs without times, models without a level, and models too large for the budget.
    """
    costs = {name: read_costs(name) for name in dict.fromkeys(entry.costs for entry in file.models)}
    return [_planned(file, entry, costs[entry.costs], ttft_p99_s) for entry in file.models]


def _planned(file: ModelsFile, entry: ModelEntry, costs: Costs, ttft_p99_s: float | None) -> PlannedModel:
    level_s = entry.ttft_p99_s or ttft_p99_s
    if level_s is None:
        raise BadInput(f"{entry.name} has no level: give it ttft_p99_s, or the plan --ttft-p99.")
    if costs.compute is None or costs.migration is None or not (costs.compute.prefill and costs.compute.decode):
        raise BadInput(f"{entry.name}: the costs {entry.costs} have no step times, or no bytes of KV per token.")
    startup_s = costs.startup_s if entry.startup_s is None else entry.startup_s
    if not startup_s:
        raise BadInput(f"{entry.name}: neither the costs {entry.costs} nor startup_s have the time of a start.")
    memory = ModelMemory(
        _bytes(entry.parameters_mib),
        _bytes(entry.fixed_mib),
        _bytes(entry.asleep_mib),
        Bytes(BLOCK_TOKENS * costs.migration.kv_bytes),
        Blocks(-(-entry.max_model_len // BLOCK_TOKENS)),
    )
    budget = _bytes(file.budget_mib)
    if memory.least > budget:
        raise BadInput(
            f"{entry.name} needs {mib(memory.least)} MiB at its floor (parameters_mib {entry.parameters_mib:g}, "
            f"fixed_mib {entry.fixed_mib:g}, KV of max_model_len {mib(Bytes(memory.floor * memory.block))}), more than "
            f"budget_mib {file.budget_mib:g}."
        )
    if memory.asleep > memory.least:
        raise BadInput(f"{entry.name}: asleep_mib is more than it needs awake, {mib(memory.least)} MiB.")
    capacity = Tokens(BLOCK_TOKENS * memory.blocks_in(budget))
    return PlannedModel(entry, replace(costs, startup_s=startup_s), memory, capacity, level_s)


def require_room(file: ModelsFile, models: Iterable[PlannedModel], devices: int) -> None:
    """Raise `BadInput` if the floors of all minimums exceed the budgets of that many devices."""
    floors = sum(model.entry.min_replicas * model.memory.least for model in models)
    if floors > devices * _bytes(file.budget_mib):
        raise BadInput(
            f"The floors of all min_replicas are {mib(Bytes(floors))} MiB in all, more than {devices} devices of "
            f"{file.budget_mib:g} MiB have: {mib(Bytes(devices * _bytes(file.budget_mib)))} MiB."
        )


def mib(size: Bytes) -> str:
    """Bytes as whole MiB."""
    return f"{size / MIB:,.0f}"


def _bytes(size_mib: float) -> Bytes:
    return Bytes(round(size_mib * MIB))
