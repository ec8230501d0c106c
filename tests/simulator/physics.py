"""Small worlds to look into: jobs, engines, an observer that keeps everything, and a policy that follows a script."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import fits
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Plan, Reason
from policies.rules.policy import NONE, Barred
from simulator.costs.costs import IDEAL, ComputeCosts, Costs, LinkCosts, MigrationCosts, PathChoice
from simulator.costs.steps import StepTimes
from simulator.workload.workload import Job
from simulator.world.batch import NEVER
from simulator.world.engine import Memory, Settled, SimulatedEngine
from simulator.world.live import Live
from simulator.world.observer import Life, Transfer
from simulator.world.setup import Setup
from simulator.world.world import World, one_pool

COMPUTE = ComputeCosts(linear=((1, 0.01), (100, 0.01), (200, 0.11)), chunk_tokens=200)
"""A step takes 10 ms for up to 100 tokens, and 1 ms more for every token beyond."""
MIGRATION = MigrationCosts(
    intra=LinkCosts(1000.0), inter=LinkCosts(100.0), kv_bytes=1, path=PathChoice.KV, block_tokens=10, handover_s=0.1
)
"""A byte per token: a replica's port carries a thousand tokens per second, a node's uplink a hundred."""

Turn = Callable[[Cluster], None]


def job(name: str, at: float = 0.0, prompt: int = 100, output: int = 100) -> Job:
    """A request."""
    return Job(RequestId(name), at, Tokens(prompt), Tokens(output))


def live(name: str, prompt: int = 100, output: int = 100, order: int = 0) -> Live:
    """A request that has just arrived."""
    return Live(job(name, 0.0, prompt, output), order)


def engine(
    capacity: int = 1000, compute: ComputeCosts | None = None, rate: float = 10.0, memory: Memory = Memory.STRICT
) -> SimulatedEngine:
    """An idle engine; without `compute` every request decodes `rate` tokens per second."""
    return SimulatedEngine(ReplicaId("gpu-0"), "node-0", Tokens(capacity), StepTimes(compute, rate), memory)


def run(machine: SimulatedEngine, until: float = NEVER, now: float = 0.0) -> list[tuple[float, Settled]]:
    """Let the engine work from now on; what happened when."""
    happened = [(now, machine.settle(now))]
    while (due := round(machine.due(), 9)) <= until and due < NEVER:
        happened.append((due, machine.settle(due)))
    return happened


@dataclass(slots=True)
class FleetLog:
    """An observer of a fleet that keeps what happened."""

    gpus: list[tuple[float, int]] = field(default_factory=list)
    machines: list[tuple[float, int | None]] = field(default_factory=list)
    lives: dict[str, Life] = field(default_factory=dict)
    preempted_s: list[float] = field(default_factory=list)

    def counted(self, now: float, gpus: int, machines: int | None = None) -> None:
        self.gpus.append((now, gpus))
        self.machines.append((now, machines))

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        pass

    def preempted(self, now: float, tokens: Tokens) -> None:
        self.preempted_s.append(now)

    def finished(self, now: float, life: Life) -> None:
        assert life.job.id not in self.lives
        self.lives[life.job.id] = life


@dataclass(slots=True)
class Log:
    """An observer that keeps everything."""

    gpus: list[tuple[float, int]] = field(default_factory=list)
    machines: list[int | None] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    preempted_s: list[float] = field(default_factory=list)
    lives: dict[str, Life] = field(default_factory=dict)
    steps: dict[float, float] = field(default_factory=dict)

    def decided(
        self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0, machines: int | None = None
    ) -> None:
        """Keep the number of replicas and what was decided; the cluster must be sound."""
        cluster.check_integrity()
        self.gpus.append((now, len(cluster.replicas) + closing))
        self.machines.append(machines)
        self.plans += plans

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        """Keep the tokens by step time."""
        self.steps[step_s] = self.steps.get(step_s, 0.0) + tokens

    def transferred(self, now: float, transfer: Transfer) -> None:
        """Keep it."""
        self.transfers.append(transfer)

    def preempted(self, now: float, tokens: Tokens) -> None:
        """Keep when it was."""
        self.preempted_s.append(now)

    def finished(self, now: float, life: Life) -> None:
        """Keep it; nothing may end twice."""
        assert life.job.id not in self.lives
        self.lives[life.job.id] = life


@dataclass(frozen=True, slots=True)
class Scripted:
    """Opens `replicas` replicas, places requests on the first with room, and executes its script by epoch.

    With `script` {1: act}, `act(cluster)` is called in the second epoch, after arrivals have been placed. Where
    arrivals do not wait for epochs, the decision on the empty cluster at the start is none of these.
    """

    script: Mapping[int, Turn] = field(default_factory=dict)
    replicas: int = 0
    headroom_s: float = 0.0
    knows_sharing: bool = False
    epochs: list[int] = field(default_factory=lambda: [0])

    def under(self, costs: Costs) -> "Scripted":
        """The same policy, for a world with these costs that has not begun."""
        self.epochs[0] = 0 if costs.slots else -1
        return self

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """The oldest replica with room."""
        return next((r for r in cluster.running() if fits(cluster, request, r)), None)

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """See `Policy`."""
        for request in changes.waiting:
            replica = self.place(cluster, request) or cluster.decisions.open()
            if replica is not None:
                cluster.decisions.place(request, replica)
        while len(cluster.replicas) < self.replicas:
            cluster.decisions.open()
        self.script.get(self.epochs[0], _nothing)(cluster)
        self.epochs[0] += 1


def _nothing(cluster: Cluster) -> None:
    pass


def move(name: str, target: int, reason: Reason = Reason.OVERLOAD) -> Turn:
    """Move that request to the replica of that number."""

    def act(cluster: Cluster) -> None:
        cluster.decisions.move(cluster.requests[RequestId(name)], cluster.replicas[ReplicaId(f"gpu-{target}")], reason)

    return act


def world(
    policy: Scripted,
    costs: Costs = IDEAL,
    *,
    capacity: int = 1000,
    rate: float = 10.0,
    nodes_of: int = 8,
    until: float = 100.0,
    up: int = 0,
    block_tokens: int = 0,
) -> tuple[World, Log]:
    """A world that has not begun, and its observer; `up` replicas are open from the start and stay.

    With `block_tokens` they have prefix caches.
    """
    log = Log()
    setup = Setup(
        Tokens(capacity), rate, gpus_per_node=nodes_of, horizon_s=until, min_replicas=up, block_tokens=block_tokens
    )
    return one_pool(policy.under(costs), setup, costs, log), log


def play(
    jobs: Sequence[Job],
    script: Mapping[int, Turn] | None = None,
    costs: Costs = IDEAL,
    *,
    capacity: int = 1000,
    rate: float = 10.0,
    nodes_of: int = 8,
    until: float = 100.0,
    up: int = 0,
) -> Log:
    """Play jobs through a scripted policy; what was observed."""
    played, log = world(
        Scripted(script or {}), costs, capacity=capacity, rate=rate, nodes_of=nodes_of, until=until, up=up
    )
    played.run(jobs)
    return log
