"""What one API key may use: requests and tokens per minute, and requests at a time.

Pure calculations: whoever asks says what time it is, in seconds of any clock that does not go back.

A rate is a token bucket (Turner, "New directions in communications", 1986): it holds a minute's worth, so that much
may come at once, and fills evenly. A request is charged what it may use at most when it is let in, and at its end
that is corrected to what it used. So a bucket may fall below zero, by requests that turned out larger than they said
or are larger than a minute's worth; then it fills first. Over any time T a key therefore uses at most a minute's worth,
plus T times its rate, plus what the requests then under way use beyond what they were charged.
"""

from dataclasses import dataclass, field

MINUTE_S = 60.0

_ROUNDING = 1e-6
"""What sums of floating-point times may be short of, in requests or tokens."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may use; None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that is reached: what it says, and after how many seconds it will do, None if time does not tell."""

    limit: str
    wait_s: float | None = None


@dataclass(slots=True)
class Bucket:
    """Holds up to `per_minute`, and gets that much in a minute. `level` is as of the time `as_of`, in seconds."""

    per_minute: int
    level: float
    as_of: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> "Bucket":
        """One of which nothing was taken yet."""
        return cls(per_minute, float(per_minute), now)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is there, or the bucket full if that is less; 0 if it is."""
        self._fill(now)
        lacking = min(amount, self.per_minute) - self.level
        return lacking * MINUTE_S / self.per_minute if lacking > _ROUNDING else 0.0

    def add(self, amount: float, now: float) -> None:
        """Give back, or take if `amount` is negative. What does not fit is lost; the level may fall below zero."""
        self._fill(now)
        self.level = min(float(self.per_minute), self.level + amount)

    def resized(self, per_minute: int, now: float) -> "Bucket":
        """Another rate, of which as much is used up."""
        self._fill(now)
        return Bucket(per_minute, min(float(per_minute), per_minute - self.per_minute + self.level), now)

    def _fill(self, now: float) -> None:
        rate = self.per_minute / MINUTE_S
        self.level = min(float(self.per_minute), self.level + max(0.0, now - self.as_of) * rate)
        self.as_of = max(self.as_of, now)


@dataclass(slots=True)
class Meter:
    """What one key uses. A request goes through `begin`, `charge`, `correct` and `end`, in this order."""

    limits: KeyLimits = field(default_factory=KeyLimits)
    running: int = 0
    _requests: Bucket | None = None
    _tokens: Bucket | None = None

    def limit(self, limits: KeyLimits, now: float) -> None:
        """Heed these limits from now on; what was used up stays used up."""
        self.limits = limits
        self._requests = _sized(self._requests, limits.requests_per_minute, now)
        self._tokens = _sized(self._tokens, limits.tokens_per_minute, now)

    def begin(self, now: float) -> Exceeded | None:
        """Count one more request, unless a limit is reached: then nothing changes."""
        most = self.limits.concurrent_requests
        if most is not None and self.running >= most:
            return Exceeded(f"{most} requests at a time")
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1, now):
                return Exceeded(f"{self._requests.per_minute} requests per minute", wait_s)
            self._requests.add(-1, now)
        self.running += 1
        return None

    def charge(self, tokens: int, now: float) -> Exceeded | None:
        """Charge what a request may use, unless the limit is reached: then nothing changes."""
        if self._tokens is not None:
            if wait_s := self._tokens.wait_s(tokens, now):
                return Exceeded(f"{self._tokens.per_minute} tokens per minute", wait_s)
            self._tokens.add(-tokens, now)
        return None

    def correct(self, charged: int, used: int, now: float) -> None:
        """A request was charged so many tokens, and used so many."""
        if self._tokens is not None:
            self._tokens.add(charged - used, now)

    def end(self) -> None:
        """One request less."""
        self.running -= 1


def _sized(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    return bucket.resized(per_minute, now) if bucket is not None else Bucket.full(per_minute, now)
