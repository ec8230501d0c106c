"""Peers are called once each, few at a time, and not all of many."""

import asyncio
from collections import Counter

from deployments.replica.peers import MOST, PeerConnections, successors
from policies.model import ReplicaId

OWN = ReplicaId("m")


class Peers:
    """Calls wait for `answer`, and those to `dead` peers fail."""

    def __init__(self, *dead: str) -> None:
        self.calls, self.forgotten = Counter[str](), list[str]()
        self.at_once = self.most = 0
        self.answer = asyncio.Event()
        self._dead = dead

    def of(self, own: ReplicaId) -> PeerConnections:
        return PeerConnections(own, self._call, self.forgotten.append)

    async def _call(self, peer: ReplicaId) -> None:
        self.calls[peer] += 1
        if peer in self._dead:
            raise ConnectionError(peer)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await self.answer.wait()
        self.at_once -= 1


def ids(*names: str) -> list[ReplicaId]:
    return [ReplicaId(name) for name in names]


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_every_peer_is_called_once_however_often_the_list_comes() -> None:
    peers = Peers("b")
    peers.answer.set()
    connections = peers.of(OWN)
    for running in (ids("a"), ids("a", "b", "m"), ids("a", "b", "c", "m")):
        connections.follow(running)
        await settle()
    assert peers.calls == {"a": 1, "b": 1, "c": 1}, "neither itself, nor again one that failed"
    connections.follow(ids("c", "m"))
    assert sorted(peers.forgotten) == ["a", "b"]


async def test_few_calls_are_under_way_at_once_and_end_with_the_replica() -> None:
    peers = Peers()
    connections = peers.of(OWN)
    connections.follow(ids(*"abcdefghm"))
    await settle()
    assert peers.most == 4
    connections.close()
    await settle()
    peers.answer.set()
    await settle()
    assert peers.calls.total() == 4, "the others are not called any more"


async def test_of_many_peers_a_replica_calls_its_successors_only() -> None:
    peers = Peers()
    peers.answer.set()
    running = ids(*(f"{number:03}" for number in range(100)))
    connections = peers.of(running[95])
    connections.follow(running)
    await settle()
    assert sorted(peers.calls) == running[:12] + running[96:]
    connections.follow([each for each in running if each not in running[90:98]])
    assert sorted(peers.forgotten) == running[90:98], "a move may have connected to any of them"


def test_successors_are_spread_evenly() -> None:
    running = ids(*(f"{number:03}" for number in range(100)))
    assert set(Counter(peer for own in running for peer in successors(own, running)).values()) == {MOST}
    assert successors(OWN, []) == [] and successors(OWN, [OWN]) == []
    assert successors(ReplicaId("b"), ids("a", "c")) == ["c", "a"], "a replica that is not listed yet"
