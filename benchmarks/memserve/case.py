"""The paper's settings and workloads as values, and the cluster that all of them share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from policies.model import Tokens
from policies.prefix.routing import Routing
from simulator.command.runs import SimulationRun
from simulator.costs.costs import Costs, read_costs
from simulator.outcome.metrics import Window
from simulator.workload.sessions import SHAPES, SessionRequest, sessions
from simulator.workload.workload import ArrivalTrace, Job, Recipe, draw, made_up, poisson_times
from simulator.world.setup import Setup

CAPACITY = Tokens(140_000)
"""Llama 2 13B on two GPUs with 80 GB: what nine tenths of them leave beside 26 GB of weights, in tokens of 0.82 MB."""
BLOCK = 16
POLICY = "worst_fit"
"""Of instances that are equal by content, the one with the most room is chosen: their number is fixed."""
WINDOW = Window(60.0, 240.0)

RATES: Mapping[str, tuple[float, ...]] = {
    "sharegpt_like": (2.0, 4.0, 6.0),
    "loogle_like": (1.0, 2.0, 3.0),
    "react_like": (0.5, 1.0, 1.5),
}
"""Requests per second and instance: the paper's figures have up to five."""
TURNS: Mapping[str, float] = {"sharegpt_like": 4.0, "loogle_like": 5.0, "react_like": 5.0}
"""Requests of a session, as a mean."""


@dataclass(frozen=True, slots=True)
class PaperSetting:
    """Instances of which `prefills` are for prefills alone (0: all do both), with context caching if they are `cached`.

    With `returns`, what the others have decoded goes back to these. `name` is the paper's.
    """

    name: str
    instances: int
    prefills: int = 0
    cached: bool = False
    returns: bool = True


TRIPLE = (
    PaperSetting("PD", 3),
    PaperSetting("PD-CC", 3, cached=True),
    PaperSetting("1P2D", 3, 1),
    PaperSetting("1P2D-CC", 3, 1, cached=True),
    PaperSetting("2P1D", 3, 2),
    PaperSetting("2P1D-CC", 3, 2, cached=True),
)

STEPS = (
    PaperSetting("PD-Basic", 2, 1),
    PaperSetting("PD-Caching-2", 2, 1, cached=True, returns=False),
    PaperSetting("PD-Caching-3", 2, 1, cached=True),
)
"""The paper's steps towards caching in one pair of instances; PD-Caching-1 is not simulated."""

SCHEDULED = PaperSetting("3P1D-CC", 4, 3, cached=True)
"""The setting of the paper's study of its scheduler."""
SHARES = (1, 2, 4)
"""Share ratios: sessions about the same document."""
SHARED_RATE = 3.0
"""Requests per second and instance in that study."""


@dataclass(frozen=True, slots=True)
class PaperCase:
    """One workload on one setting, with `rate` requests per second and instance and `share` sessions per document."""

    setting: PaperSetting
    workload: str
    rate: float
    seed: int = 0
    routing: Routing = Routing.TREE
    share: int = 1

    def run(self) -> SimulationRun:
        """The simulation."""
        setting = self.setting
        setup = Setup(
            CAPACITY,
            horizon_s=WINDOW.horizon_s,
            min_replicas=setting.instances,
            max_gpus=setting.instances,
            block_tokens=BLOCK if setting.cached else 0,
            routing=self.routing,
            prefill_gpus=setting.prefills,
            returns=setting.returns,
        )
        return SimulationRun(POLICY, self.seed, self._jobs(), setup, WINDOW, costs())

    def _jobs(self) -> tuple[Job, ...]:
        per_s = self.rate * self.setting.instances / TURNS[self.workload]
        begins = takewhile(lambda at_s: at_s < WINDOW.horizon_s, poisson_times(per_s, self.seed))
        asked = [_about(each, self.share) for each in sessions(SHAPES[self.workload], begins, self.seed)]
        block = BLOCK if self.setting.cached else 0
        rows = tuple(sorted(made_up(asked, self.seed, block), key=lambda row: row.at_s))
        recipe = Recipe(ArrivalTrace(rows), None, WINDOW.horizon_s, CAPACITY, block_tokens=block)
        return draw(recipe, self.seed).jobs


def _about(request: SessionRequest, share: int) -> SessionRequest:
    """The request of a session that shares its document with the `share` - 1 sessions around it."""
    number = int(request.session.removeprefix("s"))
    own, common = f"{request.session}/document", f"s{number // share * share}/document"
    prompt = tuple(each._replace(text=common) if each.text == own else each for each in request.prompt)
    return replace(request, prompt=prompt)


def costs() -> Costs:
    """Llama 2 13B on an A100, with links as measured between the GPUs of a DGX H100; nothing starts during a run."""
    compute, links = read_costs("a100-40g-13b-pcie"), read_costs("h100-8b-nvlink").migration
    assert compute.migration is not None
    assert links is not None
    return replace(compute, migration=replace(compute.migration, intra=links.intra, inter=links.intra))
