"""Ray Serve's rule for the number of replicas, as a pure function of the load and of the earlier calls.

The number in proportion to the load is `load / target`: Serve's load are the ongoing requests, and its target is
`target_ongoing_requests`. A change is made once it has been wanted for the delay of its direction without interruption.
A test compares every step with Ray's own function (`ray.serve.autoscaling_policy`, Ray 2.60; both scaling factors 1).
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

TOLERANCE_S = 1e-6
"""Ray's tolerance in comparisons of a delay with the time passed."""


class LoadMeasure(StrEnum):
    """The measure of the load that the rule scales with."""

    REQUESTS = "ongoing requests"
    """Running and queued requests: Ray Serve's autoscaler."""
    KV = "KV utilisation"
    """KV caches in use, queued prompts included, in replicas: an autoscaler by vLLM's cache metric."""


class FleetRouter(StrEnum):
    """The rule by which a request gets its replica."""

    TWO_CHOICES = "two choices"
    """Of two random replicas, the one with fewer ongoing requests (the power of two choices), as in Ray Serve."""
    LEAST_KV = "least KV"
    """The replica with the least KV in use or queued."""


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The configuration of an autoscaler and of its router; defaults are Ray Serve's. Times are in seconds.

    The load is the mean of samples over the `look_back_s` before the newest push; pushes are `push_s` apart. `target`
    is the load per replica. At most `max_ongoing` requests are sent to a replica, the others queue at the router (None:
    no limit, as in ray.serve.llm). With `looks_ahead` the load is the largest of the present one and the coming ones up
    to a start-up time ahead, which a fleet has to foresee.
    """

    measure: LoadMeasure = LoadMeasure.REQUESTS
    target: float = 2.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_s: float = 30.0
    push_s: float = 10.0
    max_ongoing: int | None = None
    router: FleetRouter = FleetRouter.TWO_CHOICES
    looks_ahead: bool = False

    @property
    def lag_s(self) -> float:
        """The time until a lasting rise in the load is seen in full and acted on."""
        return self.push_s + self.look_back_s + self.upscale_delay_s


@dataclass(frozen=True, slots=True)
class WantedChange:
    """A change that is wanted but not made yet: up (1) or down (-1), `since` a time in seconds; 0 for none."""

    direction: int = 0
    since: float = 0.0


def proposed(rule: ScalingRule, load: float, running: int, wanted: int) -> int:
    """The number of replicas for a load, delays left out. `wanted` is the present target number.

    In the order of Ray's operations, since a ceiling follows. Without running replicas, at least one for any load.
    """
    if running == 0:
        return max(1, wanted) if load > 0 else wanted
    desired = running * (load / (rule.target * running))
    return ceil(running + 1.0 * (desired - running))


def scale(
    rule: ScalingRule, load: float, running: int, wanted: int, before: WantedChange, now: float
) -> tuple[int, WantedChange]:
    """The new target number of replicas, before any bounds, and the change that is still delayed."""
    number = proposed(rule, load, running, wanted)
    if running == 0 and number > 0:
        return number, before
    number = max(0, number)
    if number == wanted:
        return wanted, WantedChange()
    up = number > wanted
    direction, delay_s = (1, rule.upscale_delay_s) if up else (-1, rule.downscale_delay_s)
    change = before if before.direction == direction else WantedChange(direction, now)
    if now - change.since + TOLERANCE_S < delay_s:
        return wanted, change
    return (number if up or wanted == 1 else max(1, number)), WantedChange()


class LoadSamples:
    """Samples of a load over time, of which those up to the newest push are visible."""

    def __init__(self, look_back_s: float, push_s: float) -> None:
        self._look_back_s = look_back_s
        self._push_s = push_s
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, load: float) -> None:
        """Add a sample. Times do not fall."""
        self._samples.append((now, load))
        while self._samples[0][0] < now - self._look_back_s - self._push_s:
            self._samples.popleft()

    def mean(self, now: float) -> float | None:
        """The mean over the look-back period before the newest push; None before the first push."""
        pushed = now // self._push_s * self._push_s
        loads = [load for at, load in self._samples if pushed - self._look_back_s < at <= pushed]
        return sum(loads) / len(loads) if loads else None


class Autoscaler:
    """The rule over time: a number of replicas within bounds, from the load as it is now and was before.

    `most` is None without a greatest number.
    """

    def __init__(self, rule: ScalingRule, least: int, most: int | None) -> None:
        self.wanted = least
        self._rule = rule
        self._least = least
        self._most = most
        self._samples = LoadSamples(rule.look_back_s, rule.push_s)
        self._change = WantedChange()

    def observe(self, now: float, load: float, running: int) -> int:
        """The wanted number of replicas at `now`, in seconds, which does not fall; `running` are those that run."""
        self._samples.add(now, load)
        if (mean := self._samples.mean(now)) is not None:
            wanted, self._change = scale(self._rule, mean, running, self.wanted, self._change, now)
            self.wanted = max(self._least, wanted if self._most is None else min(wanted, self._most))
        return self.wanted
