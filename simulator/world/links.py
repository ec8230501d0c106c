"""Links with bandwidth sharing between concurrent transfers.

A transfer uses several links at once: the ports of the sending and of the receiving replica and, between nodes, both
nodes' uplinks. Each link divides its bandwidth equally among its transfers, and a transfer's rate is the smallest of
its shares. The unused part of its other shares is not given to other transfers. So the start or end of a transfer only
affects transfers with a common link, and the model errs on the slow side.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from policies.model import Bytes
from policies.paths.choice import LinkId
from simulator.world.loop import Loop, Timer, Turn


class Flow:
    """A transfer under way, with `left` bytes to send at the time `since`, at `rate` bytes per second."""

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
        """Subtract the bytes sent since the last call."""
        self.left = max(0.0, self.left - self.rate * (now - self.since))
        self.since = now


class Links:
    """All links, each created at its first use. `bandwidth` returns a link's bytes per second."""

    def __init__(self, loop: Loop, bandwidth: Callable[[LinkId], float]) -> None:
        self._loop = loop
        self._bandwidth = bandwidth
        self._flows: dict[LinkId, dict[Flow, None]] = {}

    def busy(self, links: Iterable[LinkId]) -> bool:
        """True if a transfer uses one of these links."""
        return any(self._flows.get(link) for link in links)

    def send(self, links: Sequence[LinkId], size: Bytes, latency_s: float, done: Callable[[], None]) -> Flow:
        """Begin a transfer; `done` is called `latency_s` seconds after its last byte has left."""
        flow = Flow(links, size, latency_s, done)
        flow.since = self._loop.now
        for link in links:
            self._flows.setdefault(link, {})[flow] = None
        self._share(self._affected(links))
        return flow

    def cancel(self, flow: Flow) -> Bytes:
        """End a transfer. Returns the bytes sent so far."""
        if flow.timer is not None:
            flow.timer.cancel()
        if flow in self._flows[flow.links[0]]:
            flow.progress(self._loop.now)
            self._remove(flow)
        return Bytes(round(flow.size - flow.left))

    def backlog(self, link: LinkId) -> float:
        """The bytes left to send over the link."""
        return sum(flow.left - flow.rate * (self._loop.now - flow.since) for flow in self._flows.get(link, ()))

    def _sent(self, flow: Flow) -> None:
        flow.left = 0.0
        self._remove(flow)
        flow.timer = self._loop.at(self._loop.now + flow.latency_s, Turn.LINK, flow.done)

    def _remove(self, flow: Flow) -> None:
        for link in flow.links:
            del self._flows[link][flow]
        self._share(self._affected(flow.links))

    def _affected(self, links: Sequence[LinkId]) -> dict[Flow, None]:
        return {flow: None for link in links for flow in self._flows[link]}

    def _share(self, flows: Iterable[Flow]) -> None:
        """Give each of these transfers its share, and schedule its end."""
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
