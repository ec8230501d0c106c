"""The order by priority, and the priorities themselves."""

import random

import pytest

from policies.cluster.replica import Replica
from policies.model import ReplicaId
from policies.rules.mell.ranking import Ranking, Weights
from tests.policies.rules.mell.clusters import C, cluster


def replica(order: int, load: int = 0) -> Replica:
    return Replica(ReplicaId(f"r{order}"), "node", C, order, load=load)


def test_best_is_the_highest_score_with_room() -> None:
    ranking = Ranking()
    for order, score, room in [(1, 0.5, 10), (2, 0.9, 5), (3, 0.5, 20), (4, 0.1, 99)]:
        ranking.add(replica(order), score, room)
    assert [ranking.best(need).order for need in (5, 10, 20, 21)] == [2, 1, 3, 4]  # type: ignore[union-attr]
    assert ranking.best(100) is None
    assert ranking.best(5, lambda r: r.order > 2).order == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(5))
def test_best_equals_an_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    ranking = Ranking()
    entries: dict[int, tuple[float, int, Replica]] = {}
    for step in range(400):
        if entries and rng.random() < 0.4:
            score, _, gone = entries.pop(rng.choice(list(entries)))
            ranking.remove(gone, score)
        else:
            entries[step] = rng.choice([0.1, 0.2, 0.3]), rng.randint(0, 50), replica(step)
            ranking.add(entries[step][2], *entries[step][:2])
        need = rng.randint(0, 60)
        fitting = [(score, -order, r) for order, (score, room, r) in entries.items() if room >= need]
        assert ranking.best(need) is (max(fitting)[2] if fitting else None)


@pytest.mark.parametrize(
    ("weights", "higher", "lower"),
    [
        pytest.param(Weights(1, 0, 0), "A: M.4", "A: M.5", id="free memory"),
        pytest.param(Weights(1, 0.1, 0), "A: M.5", "A: T.2 T.2", id="fewer requests"),
        pytest.param(Weights(1, 0.01, 0), "A: T.2 T.2", "A: M.5", id="as they are weighed"),
    ],
)
def test_priority_by_workload(weights: Weights, higher: str, lower: str) -> None:
    (first,), (second,) = (cluster(drawing).replicas.values() for drawing in (higher, lower))
    assert weights.workload(first) > weights.workload(second)


@pytest.mark.parametrize(("same_node", "preferred"), [(1.0, "B"), (0.1, "C")])
def test_priority_toward_a_replica_weighs_distance(same_node: float, preferred: str) -> None:
    here, *others = cluster("A@n0: L.6 | B@n0: M.4 S.3 | C@n1: M.4").replicas.values()
    weights = Weights(1, 0, same_node)
    assert max(others, key=lambda other: weights.toward(here, other)).id == preferred
