"""Links that transfers share: fairly, and never beyond what they carry.

A transfer uses several links at once: the port of the replica that sends and of the one that receives and, between
nodes, both nodes' uplinks. Each link divides its bandwidth equally among the transfers that use it, and a transfer goes
as fast as the smallest of its shares. What it cannot use elsewhere because of that is not given to others, so that
starting or ending a transfer concerns only those it shares a link with, and the model errs on the slow side.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from app.simulator.world.loop import Loop, Timer, Turn
from policies.model import Bytes
from policies.paths.choice import LinkId


class Flow:
    """A transfer under way: `left` bytes were still to be sent at `since`, and go at `rate` bytes per second."""

    __slots__ = ("done", "latency_s", "left", "links", "rate", "since", "size", "timer")

    def __init__(self, links: Sequence[LinkId], size: Bytes, latency_s: float, done: Callable[[], None]) -> None:
        self.links = links
        self.size = size
        self.left = float(size)
        self.latency_s = latency_s
        self.rate = 0.0
        self.since = 0.0
        self.done = done
        self.timer: Timer | None = None

    def progress(self, now: float) -> None:
        """Count what has been sent until now."""
        self.left = max(0.0, self.left - self.rate * (now - self.since))
        self.since = now


class Links:
    """Every link, created when it is first used. `bandwidth` tells a link's bytes per second."""

    def __init__(self, loop: Loop, bandwidth: Callable[[LinkId], float]) -> None:
        self._loop = loop
        self._bandwidth = bandwidth
        self._flows: dict[LinkId, dict[Flow, None]] = {}

    def send(self, links: Sequence[LinkId], size: Bytes, latency_s: float, done: Callable[[], None]) -> Flow:
        """Begin a transfer; `done` is called `latency_s` seconds after its last byte has left."""
        flow = Flow(links, size, latency_s, done)
        flow.since = self._loop.now
        for link in links:
            self._flows.setdefault(link, {})[flow] = None
        self._share(self._concerned(links))
        return flow

    def cancel(self, flow: Flow) -> Bytes:
        """End a transfer, and return how much was sent of it."""
        if flow.timer is not None:
            flow.timer.cancel()
        if flow in self._flows[flow.links[0]]:
            flow.progress(self._loop.now)
            self._remove(flow)
        return Bytes(round(flow.size - flow.left))

    def backlog(self, link: LinkId) -> float:
        """Bytes that are still to go over the link."""
        return sum(flow.left - flow.rate * (self._loop.now - flow.since) for flow in self._flows.get(link, ()))

    def _sent(self, flow: Flow) -> None:
        flow.left = 0.0
        self._remove(flow)
        flow.timer = self._loop.at(self._loop.now + flow.latency_s, Turn.LINK, flow.done)

    def _remove(self, flow: Flow) -> None:
        for link in flow.links:
            del self._flows[link][flow]
        self._share(self._concerned(flow.links))

    def _concerned(self, links: Sequence[LinkId]) -> dict[Flow, None]:
        return {flow: None for link in links for flow in self._flows[link]}

    def _share(self, flows: Iterable[Flow]) -> None:
        """Give each of these transfers its share, and ask to be told when it will be through."""
        now = self._loop.now
        for flow in flows:
            rate = min(self._bandwidth(link) / len(self._flows[link]) for link in flow.links)
            if rate == flow.rate:
                continue
            flow.progress(now)
            flow.rate = rate
            if flow.timer is not None:
                flow.timer.cancel()
            flow.timer = self._loop.at(now + flow.left / rate, Turn.LINK, partial(self._sent, flow))
