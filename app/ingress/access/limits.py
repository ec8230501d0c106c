"""Limits of one API key: requests and tokens per minute, and concurrent requests.

Pure calculations: time is an argument, in seconds of any monotonic clock.

A rate is a token bucket (Turner, "New directions in communications", 1986): it holds one minute's worth, available at
once, and refills evenly. A request is charged its maximum usage at admission; at its end the charge is settled to the
actual usage. A bucket therefore falls below zero when requests use more than they were charged or more than a minute's
worth; it must refill before the next request. Over any time T a key uses at most a minute's worth, plus T times its
rate, plus the usage of running requests beyond their charges.
"""

from dataclasses import dataclass, field

MINUTE_S = 60.0

_ROUNDING = 1e-6
"""Tolerance for rounding in sums of floating-point times, in requests or tokens."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key; None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that is reached, in words; `wait_s` is the time until it allows the request, None if that is unknown."""

    limit: str
    wait_s: float | None = None


@dataclass(slots=True)
class Bucket:
    """Holds at most `per_minute` and refills at that rate. `level` is the content at time `as_of`, in seconds."""

    per_minute: int
    level: float
    as_of: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> "Bucket":
        """A full bucket."""
        return cls(per_minute, float(per_minute), now)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if `amount` exceeds its size; 0 if it does now."""
        self._fill(now)
        lacking = min(amount, self.per_minute) - self.level
        return lacking * MINUTE_S / self.per_minute if lacking > _ROUNDING else 0.0

    def add(self, amount: float, now: float) -> None:
        """Add `amount`, or take it if negative. The level is capped at `per_minute` and may fall below zero."""
        self._fill(now)
        self.level = min(float(self.per_minute), self.level + amount)

    def resized(self, per_minute: int, now: float) -> "Bucket":
        """A bucket with another rate and the same amount used up."""
        self._fill(now)
        return Bucket(per_minute, min(float(per_minute), per_minute - self.per_minute + self.level), now)

    def _fill(self, now: float) -> None:
        rate = self.per_minute / MINUTE_S
        self.level = min(float(self.per_minute), self.level + max(0.0, now - self.as_of) * rate)
        self.as_of = max(self.as_of, now)


@dataclass(slots=True)
class Meter:
    """Usage of one key. A request calls `begin`, `charge`, `settle` and `end`, in this order."""

    limits: KeyLimits = field(default_factory=KeyLimits)
    running: int = 0
    _requests: Bucket | None = None
    _tokens: Bucket | None = None

    def limit(self, limits: KeyLimits, now: float) -> None:
        """Set new limits; the usage so far is kept."""
        self.limits = limits
        self._requests = _sized(self._requests, limits.requests_per_minute, now)
        self._tokens = _sized(self._tokens, limits.tokens_per_minute, now)

    def begin(self, now: float) -> Exceeded | None:
        """Count one more running request. If a limit is reached, return it and change nothing."""
        most = self.limits.concurrent_requests
        if most is not None and self.running >= most:
            return Exceeded(f"{most} concurrent requests")
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1, now):
                return Exceeded(f"{self._requests.per_minute} requests per minute", wait_s)
            self._requests.add(-1, now)
        self.running += 1
        return None

    def charge(self, tokens: int, now: float) -> Exceeded | None:
        """Charge a request's maximum usage. If the limit is reached, return it and change nothing."""
        if self._tokens is not None:
            if wait_s := self._tokens.wait_s(tokens, now):
                return Exceeded(f"{self._tokens.per_minute} tokens per minute", wait_s)
            self._tokens.add(-tokens, now)
        return None

    def settle(self, charged: int, used: int, now: float) -> None:
        """Replace a request's charge by its actual usage, both in tokens."""
        if self._tokens is not None:
            self._tokens.add(charged - used, now)

    def end(self) -> None:
        """Count one running request less."""
        self.running -= 1


def _sized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    return bucket.resized(per_minute, now) if bucket is not None else Bucket.full(per_minute, now)
