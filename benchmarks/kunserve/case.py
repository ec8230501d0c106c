"""The models, contenders and cases, and the simulation of each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.kunserve.windows import PairWindow
from policies.cost.steps import HopCosts
from policies.memory.pairing import LayeredMemory, PairingTerms, even_layers
from policies.memory.plan import ModelMemory
from policies.model import Blocks, Bytes, Tokens
from simulator.costs.costs import ComputeCosts, Costs, LinkCosts, read_costs
from simulator.world.setup import Exchange, PairSetup, Setup

BLOCK = 16
HIDDEN_BYTES = 4
"""Bytes of a token's hidden state and residual in a hop, per unit of the model's width: two numbers of 16 bits."""
LOAD_BYTES_PER_S = 25e9
"""Parameters come back from the host's memory, over PCIe 4.0 with 16 lanes. Assumed."""
FIXED = Bytes(2_000_000_000)
"""Held beside parameters and KV: context, graphs, activations. Assumed."""
LATENCY_S = 20e-6
START_S = 20.0
TAIL_S = 900.0
"""Seconds after the window in which its requests may end."""


@dataclass(frozen=True, slots=True)
class PairedModel:
    """A model on replicas with `budget` bytes each for all that they hold.

    `outside` are the parameters beside the layers: embeddings and head.
    """

    name: str
    costs: str
    parameters: float
    outside: float
    layers: int
    hidden: int
    budget: float

    def memory(self, kv_bytes: int, share: float | None = None) -> LayeredMemory:
        """The memory of a replica; with a `share`, parameters that take this share of the budget, the KV unchanged."""
        parameters = self.parameters if share is None else self._parameters(share)
        outside = self.outside * parameters / self.parameters
        model = ModelMemory(Bytes(round(parameters)), FIXED, Bytes(0), Bytes(BLOCK * kv_bytes), Blocks(1))
        return LayeredMemory(model, self.layers, Bytes(round(outside)))

    def budget_for(self, share: float | None) -> Bytes:
        """The budget of a replica: with a `share` of parameters, the one that leaves KV as much room as before."""
        changed = 0.0 if share is None else self._parameters(share) - self.parameters
        return Bytes(round(self.budget + changed))

    def _parameters(self, share: float) -> float:
        return share / (1 - share) * (self.budget - self.parameters)


MODELS: Mapping[str, PairedModel] = {
    model.name: model
    for model in (
        PairedModel("Llama 2 13B", "a100-40g-13b-pcie", 26.04e9, 0.655e9, 40, 5120, 72e9),
        PairedModel("Qwen 2.5 14B", "a100-80g-14b-200gb", 29.54e9, 3.114e9, 48, 5120, 72e9),
        PairedModel("Llama 3 8B", "h100-8b-nvlink", 16.06e9, 2.101e9, 32, 4096, 72e9),
    )
}
"""Nine tenths of 80 GB each."""
MAIN = "Llama 2 13B"


class PairContender(StrEnum):
    """The rivals, all with the same bytes but `MORE`."""

    VLLM = "no moves"
    MOVES = "moves"
    MELL = "Mell's moves"
    MORE = "one replica more"
    ALWAYS = "always paired"
    PAIRS = "pairs"


_POLICIES: Mapping[PairContender, str] = {
    PairContender.VLLM: "worst_fit:overload=stall",
    PairContender.MELL: "pack",
}
"""The policy of each contender; `load_balance` for the others."""


@dataclass(frozen=True, slots=True)
class PairCase:
    """One window on one model with one contender.

    `count` replicas serve it, each with a port of `gbps` Gb/s. `size` are the members of a group, `share` the
    parameters' share of the budget (None: the model's own), `chunk` the tokens of a step (None: those of the costs).
    Every `long`-th request is longer than a replica. Without `predicts`, pairs form whenever demand exceeds all pools.
    `compute` are other step times than the model's.
    """

    contender: PairContender
    window: PairWindow
    model: str = MAIN
    seed: int = 0
    count: int = 4
    gbps: float = 200.0
    exchange: Exchange = Exchange.IN_TURN
    size: int = 2
    restores: bool = True
    share: float | None = None
    chunk: int | None = None
    long: int = 0
    predicts: bool = True
    compute: ComputeCosts | None = None

    @property
    def policy(self) -> str:
        """The policy of placements and moves."""
        return _POLICIES.get(self.contender, "load_balance")

    @property
    def served(self) -> PairedModel:
        """The model with its replicas."""
        return MODELS[self.model]

    def costs(self) -> Costs:
        """The costs of the model, with the case's links."""
        costs = read_costs(self.served.costs)
        assert costs.compute is not None
        assert costs.migration is not None
        compute = self.compute or costs.compute
        if self.chunk is not None:
            compute = replace(compute, chunk_tokens=self.chunk)
        link = LinkCosts(self.gbps * 1e9 / 8, LATENCY_S)
        return replace(
            costs, startup_s=START_S, compute=compute, migration=replace(costs.migration, intra=link, inter=link)
        )

    def capacity(self) -> Tokens:
        """The KV of a whole replica, in tokens."""
        memory = self.memory()
        return Tokens(BLOCK * memory.blocks([self.served.budget_for(self.share)], [memory.layers]))

    def gain(self) -> Tokens:
        """The KV that a group adds to its members'."""
        memory, budget = self.memory(), self.served.budget_for(self.share)
        blocks = memory.blocks([budget] * self.size, even_layers(memory.layers, self.size))
        return Tokens(BLOCK * blocks - self.size * self.capacity())

    def setup(self, horizon_s: float) -> Setup:
        """The cluster."""
        most = self.count + (self.contender is PairContender.MORE)
        setup = Setup(self.capacity(), horizon_s=horizon_s, min_replicas=self.count, max_gpus=most)
        if self.contender not in (PairContender.PAIRS, PairContender.ALWAYS):
            return setup
        memory = self.memory()
        pairs = PairSetup(
            self.gain(),
            memory.layers,
            Bytes(memory.held(1) - memory.outside),
            LOAD_BYTES_PER_S,
            HopCosts(LATENCY_S, HIDDEN_BYTES * self.served.hidden * 8 / (self.gbps * 1e9)),
            PairingTerms(size=self.size, predicts=self.predicts),
            self.contender is PairContender.ALWAYS,
            self.restores,
            self.exchange,
        )
        return replace(setup, pairs=pairs)

    def memory(self) -> LayeredMemory:
        """The memory of a replica."""
        costs = read_costs(self.served.costs)
        assert costs.migration is not None
        return self.served.memory(costs.migration.kv_bytes, self.share)
