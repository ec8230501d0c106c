"""Orders to sleep and to wake, and the counts of replicas that follow from them."""

from collections.abc import Mapping

import pytest

from deployments.api.calls import MoveAccepted
from deployments.scheduler.memory.dividing import REPEAT_S
from deployments.scheduler.sleepers import PoolSleepers
from migration.memory.tables import PoolState
from policies.decision.observation import Status
from policies.memory.ladder import Wait, Wake
from policies.memory.plan import ASLEEP
from policies.model import ReplicaId, ReplicaState, Tokens
from tests.deployments.scheduler.memory.test_node_memory import MIB, ONE, Node, refusal

A, B = ReplicaId("a"), ReplicaId("b")


class Pool:
    """Replicas on a node of 1000 MiB; asleep, each of them holds 20 MiB."""

    def __init__(self, *names: str, blocks: int = 300, most: int = 1) -> None:
        self.node = Node(*names, blocks=blocks, most=2)
        self.sleepers = PoolSleepers(ONE, self.node.nodes, self.statuses, most, dict)
        self.states = dict.fromkeys(self.node.replicas, ReplicaState.RUNNING)

    def statuses(self) -> Mapping[ReplicaId, Status]:
        return {name: Status(name, state, "n", Tokens(1)) for name, state in self.states.items()}

    async def puts_to_sleep(self, name: ReplicaId) -> None:
        assert await self.sleepers.sleep(name) == MoveAccepted(name)
        self.node.follow(name)
        self.states[name] = ReplicaState.ASLEEP
        assert not self.sleepers.follow()


async def test_a_replica_counts_as_asleep_from_the_order_on_and_as_awake_from_the_next_one_on() -> None:
    pool = Pool("a", "b")
    assert not pool.sleepers.asleep and pool.sleepers.keeps(A, ()) and not pool.sleepers.keeps(A, (B,))
    await pool.sleepers.sleep(A)
    assert pool.sleepers.asleep == {A} and pool.node.replicas[A].ordered == ASLEEP
    assert not pool.sleepers.keeps(B, ()), "one sleeps on the node already"
    pool.node.follow(A)
    pool.states[A] = ReplicaState.ASLEEP
    pool.sleepers.follow()
    assert await pool.sleepers.wake(A) == MoveAccepted("a")
    assert not pool.sleepers.asleep and pool.sleepers.waking == 1, "it is on its way, and not reported yet"
    pool.states[A] = ReplicaState.WAKING
    assert not pool.sleepers.follow() and not pool.sleepers.waking


async def test_a_wake_takes_the_pool_of_the_start_or_what_is_left_and_needs_its_floor() -> None:
    pool = Pool("a", "b")
    await pool.puts_to_sleep(A)
    await pool.node.order(B, 500)
    pool.node.follow(B)
    assert await pool.sleepers.wake(A) == MoveAccepted("a")
    assert pool.node.ordered(A) == 100, "1000 - 700 of b, less 200 of parameters and processes"
    pool.node.follow(A)
    await pool.puts_to_sleep(A)
    await pool.node.order(B, 600)
    pool.node.follow(B)
    assert pool.sleepers.climb() == Wait()
    assert refusal(await pool.sleepers.wake(A)) == (503, "awake it needs 250 MiB, and 200 MiB are free for it")
    assert pool.sleepers.asleep == {A} and not pool.sleepers.waking


async def test_an_opening_wakes_a_sleeper_and_starts_one_without_any() -> None:
    pool = Pool("a", "b")
    assert pool.sleepers.climb() is None
    await pool.puts_to_sleep(A)
    assert pool.sleepers.climb() == Wake(A, 0)


async def test_one_replica_of_a_node_wakes_at_a_time() -> None:
    pool = Pool("a", "b", most=2)
    await pool.puts_to_sleep(A)
    await pool.puts_to_sleep(B)
    await pool.sleepers.wake(A)
    assert refusal(await pool.sleepers.wake(B))[0] == 409
    pool.states[A] = ReplicaState.WAKING
    pool.sleepers.follow()
    assert pool.sleepers.climb() == Wait()


async def test_a_wake_that_fails_is_noticed_once() -> None:
    pool = Pool("a", "b")
    await pool.puts_to_sleep(A)
    await pool.sleepers.wake(A)
    assert not pool.sleepers.follow() and pool.sleepers.waking == 1
    pool.node.cause = "the file is gone"
    pool.node.gather()
    assert (pool.sleepers.follow(), pool.sleepers.follow()) == (-1, 0)
    assert pool.sleepers.asleep == {A} and pool.sleepers.climb() == Wake(A, 0), "it may be tried again"
    for task in list(pool.sleepers._giving_up):
        await task
    assert pool.node.replicas[A].ordered == ASLEEP, "others may have its memory meanwhile"


async def test_a_sleeper_that_ends_is_noticed_once() -> None:
    pool = Pool("a", "b")
    await pool.puts_to_sleep(A)
    del pool.states[A]
    assert (pool.sleepers.follow(), pool.sleepers.follow()) == (1, 0)
    assert not pool.sleepers.has_ended(A)


async def test_a_sleeper_whose_engine_ends_has_ended_until_its_replica_is_gone() -> None:
    pool = Pool("a", "b")
    await pool.puts_to_sleep(A)
    pool.states[A] = ReplicaState.DRAINING
    assert not pool.sleepers.has_ended(A)
    assert (pool.sleepers.follow(), pool.sleepers.follow()) == (1, 0)
    assert pool.sleepers.has_ended(A) and not pool.sleepers.has_ended(B)
    del pool.states[A]
    pool.sleepers.follow()
    assert not pool.sleepers.has_ended(A)


async def test_a_refused_wake_leaves_a_sleeper_that_another_opening_wakes() -> None:
    pool = Pool("a", "b", most=2)
    await pool.puts_to_sleep(A)
    await pool.puts_to_sleep(B)
    pool.sleepers.expect_wake(A)
    assert pool.sleepers.climb() == Wait(), "one wakes at a time, on whatever node"
    pool.sleepers.expect_wake(B)
    assert refusal(await pool.sleepers.wake(A))[0] == 409
    assert await pool.sleepers.wake(B) == MoveAccepted("b")
    assert pool.sleepers.asleep == {A} and pool.sleepers.waking == 1


async def test_an_order_without_an_answer_that_was_obeyed_counts_once_it_is_reported() -> None:
    pool = Pool("a", "b")
    pool.node.lost = True
    assert refusal(await pool.sleepers.sleep(A))[0] == 503
    pool.states[A] = ReplicaState.DRAINING
    assert not pool.sleepers.follow() and not pool.sleepers.asleep
    pool.states[A] = ReplicaState.ASLEEP
    assert (pool.sleepers.follow(), pool.sleepers.follow()) == (-1, 0)
    assert refusal(await pool.sleepers.wake(A))[0] == 503 and not pool.sleepers.follow()
    pool.states[A] = ReplicaState.WAKING
    assert (pool.sleepers.follow(), pool.sleepers.follow()) == (1, 0)


@pytest.mark.parametrize("state", [PoolState.LOADING, PoolState.ASLEEP])
async def test_no_division_orders_a_replica_that_loads_or_could_not_load(state: PoolState) -> None:
    pool = Pool("a", "b")
    await pool.puts_to_sleep(A)
    assert await pool.sleepers.wake(A) == MoveAccepted("a")
    pool.node.state, pool.node.cause = state, "the file is gone"
    pool.node.follow(A)
    at = pool.node.replicas[A].at
    await pool.node.divide(a=100)
    assert pool.node.replicas[A].at == at, "another size would have it load again, and a failed wake come by itself"
    pool.node.state = PoolState.SETTLED
    pool.node.gather()
    await pool.node.divide(a=100)
    assert pool.node.ordered(A) == 100


async def test_a_drop_that_keeps_failing_is_ordered_again_now_and_then_in_every_mode() -> None:
    pool = Pool("a", "b")
    assert await pool.sleepers.sleep(A) == MoveAccepted(A)
    pool.states[A], pool.node.state, pool.node.cause = ReplicaState.ASLEEP, PoolState.ASLEEP, "a worker failed"
    pool.node.gather()
    ordered = pool.node.replicas[A].at
    await pool.node.divide(acts=False)
    repeated = pool.node.replicas[A].at
    await pool.node.divide(acts=False)
    assert pool.node.replicas[A].at == repeated > ordered and pool.node.replicas[A].ordered == ASLEEP
    pool.node.time += REPEAT_S
    await pool.node.divide(acts=False)
    again = pool.node.replicas[A].at
    assert again > repeated
    pool.node.time += REPEAT_S
    pool.node.follow(A)
    await pool.node.divide(acts=False)
    assert pool.node.replicas[A].at == again, "it is asleep now; why it did not wake before may stay its cause"


async def test_a_size_by_hand_that_failed_is_ordered_again_and_stays_by_hand() -> None:
    node = Node("a", "b")
    await node.order(A, 100)
    node.cause = "the machine does not take it"
    node.gather()
    at = node.replicas[A].at
    await node.divide()
    assert node.replicas[A].at > at and node.replicas[A].by_hand and node.ordered(A) == 100


async def test_what_a_sleeper_was_measured_to_hold_counts() -> None:
    pool = Pool("a", "b")
    await pool.puts_to_sleep(A)
    pool.node.asleep_mib = 300
    pool.node.gather()
    assert pool.node.shown()[0]["held_mib"] == 500 + 300


async def test_an_engine_that_cannot_sleep_says_why() -> None:
    pool = Pool("a", "b")
    pool.node.sleepless = "it has LoRA layers"
    pool.node.gather()
    assert refusal(await pool.sleepers.sleep(A)) == (422, "it has LoRA layers") and not pool.sleepers.keeps(A, ())


async def test_divisions_make_room_for_a_wake() -> None:
    pool = Pool("a", "b")
    await pool.puts_to_sleep(A)
    await pool.node.divide(b=780)
    pool.node.follow(B)
    assert pool.sleepers.climb() == Wake(A, 0), "b can shrink to its floor"
    assert refusal(await pool.sleepers.wake(A))[0] == 503
    (device,) = pool.node.nodes.division.devices()
    assert device.room == (1000 - 20 - 230 - 200) * MIB, "what a lacks is kept free"
    await pool.node.divide(b=550)
    pool.node.follow(B)
    assert await pool.sleepers.wake(A) == MoveAccepted("a") and pool.node.ordered(A) == 50
