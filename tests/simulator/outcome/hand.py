"""A simulation by hand: the events for an observer, with numbers that can be checked on paper."""

from policies.cluster.cluster import Cluster
from policies.model import Bytes, ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Eviction, Move, Open, Path, Plan, Reason
from simulator.outcome.recorder import EventRecorder
from simulator.workload.workload import Job
from simulator.world.observer import Life, Transfer, TransferOutcome

A, B = ReplicaId("a"), ReplicaId("b")


def cluster(*replicas: list[int], starting: int = 0, waiting: int = 0) -> Cluster:
    """Replicas of 100 tokens with requests of these sizes, replicas that start, and requests that wait."""
    made = Cluster(Tokens(100))
    for number in range(waiting):
        made.add_request(RequestId(f"w{number}"), Tokens(99))
    for number, sizes in enumerate(replicas):
        replica = made.add_replica(ReplicaId(f"up{number}"), "node", Tokens(100))
        for size in sizes:
            made.decisions.place(made.add_request(RequestId(f"r{len(made.requests)}"), Tokens(size)), replica)
    for number in range(starting):
        made.add_replica(ReplicaId(f"new{number}"), "node", Tokens(100), ReplicaState.STARTING)
    made.decisions.settle()
    return made


def move(tokens: int, unit: int, reason: Reason = Reason.FILL) -> Move:
    """A move from one replica to another."""
    return Move(RequestId(f"m{unit}-{tokens}"), A, B, Tokens(tokens), reason, unit)


def evicted(tokens: int) -> Eviction:
    """An eviction."""
    return Eviction(RequestId("e"), A, Tokens(tokens))


def opened(count: int) -> tuple[Open, ...]:
    """Replicas to start."""
    return tuple(Open(ReplicaId(f"o{number}"), "node") for number in range(count))


def transfer(
    path: Path, ended_s: float, *, sent: int, took_s: float, outcome: TransferOutcome = TransferOutcome.MOVED
) -> Transfer:
    """A migration of 10 tokens that was expected to take a second and stalled its request for half of its time."""
    return Transfer(
        path=path,
        tokens=Tokens(10),
        sent=Bytes(sent),
        began_s=ended_s - took_s,
        ended_s=ended_s,
        stall_s=took_s / 2,
        same_node=path is Path.KV,
        completed=outcome is TransferOutcome.MOVED,
        outcome=outcome,
        predicted_s=1.0,
    )


def life(finished_s: float, *, stalled_s: float = 0.0) -> Life:
    """A request that takes 2 s to its first token and 10 s in all, arrived 15 s and got a token 12 s before its end."""
    job = Job(RequestId("r"), finished_s - 15, Tokens(1), Tokens(1))
    return Life(job, finished_s - 12, finished_s, 0.5, stalled_s, 2.0, 10.0, moves=1, preemptions=0)


def play(recorder: EventRecorder) -> None:
    """Ten seconds, of which the first four are for warming up.

    | now | replicas          | used | waits | bound | decided                                              |
    |  0  | a: 60, b: 60      | 120  |   3   |   2   | two moves                                            |
    |  4  | a: 60, b: 40 10   | 110  |   0   |   2   | three moves in two units, an eviction, one replica   |
    |  6  | a: 60 30, b: 20   | 110  |   1   |   2   | a move; another replica starts                       |
    """
    recorder.decided(0.0, cluster([60], [60], waiting=3), [Plan.of(moves=(move(7, 1), move(8, 2)))])
    moves = (move(10, 3), move(20, 3), move(30, 4, Reason.DRAIN))
    recorder.decided(
        4.0,
        cluster([60], [40, 10]),
        [Plan.of(moves=moves, evicted=(evicted(50),)), Plan.of(opened=opened(1), closed=(A,))],
    )
    recorder.decided(6.0, cluster([60, 30], [20], starting=1, waiting=1), [Plan.of(moves=(move(6, 5),))])
