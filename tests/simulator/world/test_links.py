"""Transfers that share links."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.model import Bytes
from policies.paths.choice import LinkId
from simulator.world.links import Flow, Links
from simulator.world.loop import Loop, Turn
from tests.counts import scaled

SPEEDS = {"a": 100.0, "b": 100.0, "up": 50.0}


class Wire:
    """Links and what has arrived over them."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.links = Links(self.loop, lambda link: SPEEDS[link])
        self.done: dict[str, float] = {}
        self.flows: dict[str, Flow] = {}

    def send(self, name: str, route: str, size: int, at: float = 0.0, latency_s: float = 0.0) -> None:
        """Send `size` bytes over the links of the route."""
        links = [LinkId(link) for link in route.split()]

        def begin() -> None:
            self.flows[name] = self.links.send(links, Bytes(size), latency_s, arrived)

        def arrived() -> None:
            self.done[name] = self.loop.now

        self.loop.at(at, Turn.EPOCH, begin)


def test_a_transfer_alone_takes_its_bytes_over_the_slowest_link_and_the_latency() -> None:
    wire = Wire()
    wire.send("x", "a up b", 100, latency_s=0.5)
    wire.loop.run(10.0)
    assert wire.done == {"x": 2.5}


def test_two_transfers_share_a_link_and_the_rest_goes_faster_again() -> None:
    wire = Wire()
    wire.send("short", "a", 50)
    wire.send("long", "a", 100)
    wire.loop.run(10.0)
    assert wire.done == {"short": 1.0, "long": 1.5}


def test_transfers_over_different_links_do_not_notice_each_other() -> None:
    wire = Wire()
    wire.send("x", "a", 100)
    wire.send("y", "b", 100)
    wire.loop.run(10.0)
    assert wire.done == {"x": 1.0, "y": 1.0}


def test_a_transfer_that_begins_later_slows_the_first_one_from_then_on() -> None:
    wire = Wire()
    wire.send("first", "a", 100)
    wire.send("second", "a", 100, at=0.5)
    wire.loop.run(10.0)
    assert wire.done == {"first": 1.5, "second": 2.0}


def test_a_cancelled_transfer_never_arrives_and_returns_the_bytes_sent() -> None:
    wire, sent = Wire(), list[int]()
    wire.send("cancelled", "a", 100)
    wire.send("other", "a", 100)
    wire.loop.at(1.0, Turn.EPOCH, lambda: sent.append(wire.links.cancel(wire.flows["cancelled"])))
    wire.loop.run(10.0)
    assert (sent, wire.done) == ([50], {"other": 1.5})


def test_a_transfer_cancelled_within_its_latency_was_sent_in_full() -> None:
    wire, sent = Wire(), list[int]()
    wire.send("x", "a", 100, latency_s=5.0)
    wire.loop.at(2.0, Turn.EPOCH, lambda: sent.append(wire.links.cancel(wire.flows["x"])))
    wire.loop.run(10.0)
    assert (sent, wire.done) == ([100], {})


def test_the_backlog_of_a_link_is_the_bytes_left_to_send() -> None:
    wire, seen = Wire(), list[float]()
    wire.send("x", "a up", 100)
    wire.send("y", "a", 100)
    wire.loop.at(1.0, Turn.ARRIVAL, lambda: seen.extend(wire.links.backlog(LinkId(link)) for link in ("a", "up", "b")))
    wire.loop.run(1.0)
    assert seen == [100.0, 50.0, 0.0]


Sends = st.lists(
    st.tuples(st.sampled_from(["a", "b", "a b", "a up", "a up b"]), st.integers(1, 500), st.floats(0.0, 5.0)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=scaled(120), deadline=None)
@given(Sends)
def test_all_bytes_arrive_and_no_link_carries_more_than_it_can(sends: list[tuple[str, int, float]]) -> None:
    wire = Wire()
    for number, (route, size, at) in enumerate(sends):
        wire.send(str(number), route, size, at)
    wire.loop.run(1e5)
    assert len(wire.done) == len(sends)
    for link, speed in SPEEDS.items():
        over = [(number, size, at) for number, (route, size, at) in enumerate(sends) if link in route.split()]
        for _, _, begin in over:
            after = [(number, size) for number, size, at in over if at >= begin]
            last = max(wire.done[str(number)] for number, _ in after)
            assert sum(size for _, size in after) <= speed * (last - begin) * (1 + 1e-6) + 1e-3


@given(st.floats(1.0, 1e3), st.floats(1.01, 10.0))
def test_a_slower_link_takes_longer(speed: float, factor: float) -> None:
    def seconds(bytes_per_s: float) -> float:
        loop, done = Loop(), list[float]()
        links = Links(loop, lambda link: bytes_per_s)
        links.send([LinkId("a")], Bytes(10_000), 0.01, lambda: done.append(loop.now))
        loop.run(1e9)
        return done[0]

    assert seconds(speed) > seconds(speed * factor)
    assert seconds(speed) == pytest.approx(10_000 / speed + 0.01)
