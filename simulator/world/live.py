"""A request in the simulated world: its progress, its location, and its statistics."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from policies.model import Phase, ReplicaId, RequestId, Tokens
from policies.prefix.routing import NOT_MATCHED, Matched
from simulator.workload.workload import Job
from simulator.world.observer import Life


class Stage(StrEnum):
    """The stages of a request."""

    NOWHERE = "nowhere"
    """Waiting for its placement, or between two replicas."""
    WAITING = "waiting"
    """Waiting on its replica for room."""
    PREFILL = "prefill"
    DECODE = "decode"
    FROZEN = "frozen"
    """Being handed over; its blocks are still held."""
    OVER = "over"


class StepCount(Protocol):
    """The batch of a decoding request. `counted` is the step count at the batch's last count."""

    @property
    def counted(self) -> float: ...

    def steps(self, now: float) -> float:
        """The step count, relative to an arbitrary beginning."""
        ...


@dataclass(slots=True, eq=False)
class Live:
    """One request. `order` counts arrivals; `turn` decides about its place in queues (`policies.precedence`).

    The KV of a decoding request grows by a token with every step of its batch: it has `base` tokens plus the batch's
    step count, and ends when the count reaches `ends`. In any other stage it has `held` tokens, or needs `held` tokens
    to resume. `at` is its replica. `standing` is the replica, phase and hop in the newest report, `reported` the size.
    `todo` are the tokens left to prefill. `stopped_s` is the time at which it last stopped decoding, None before.
    `matched` are the tokens in caches by the decision, `cached` those that its first prefill found, None before. At
    its end, its context is copied to `returns_to`.
    """

    job: Job
    order: int
    turn: float = 0.0
    id: RequestId = field(init=False)
    stage: Stage = Stage.NOWHERE
    at: ReplicaId | None = None
    standing: tuple[ReplicaId | None, Phase, int] | None = None
    batch: StepCount | None = None
    held: float = 0.0
    reported: int = 0
    base: float = 0.0
    ends: float = 0.0
    todo: int = 0
    mark: int = 0
    stopped_s: float | None = None
    first_token_s: float | None = None
    stalled_s: float = 0.0
    longest_gap_s: float = 0.0
    moves: int = 0
    preemptions: int = 0
    matched: Matched = NOT_MATCHED
    cached: int | None = None
    returns_to: ReplicaId | None = None

    def __post_init__(self) -> None:
        self.id = self.job.id
        self.held = self.reported = self.job.prompt

    def tokens(self, now: float) -> float:
        """The tokens of its KV, or those that it needs to resume."""
        return self.held if self.batch is None else self.base + self.batch.steps(now)

    @property
    def need(self) -> Tokens:
        """The whole number of tokens that it needs to resume."""
        return Tokens(math.ceil(self.held - 1e-5))

    @property
    def left(self) -> float:
        """The tokens left to generate, as of `held`."""
        return self.job.prompt + self.job.output - self.held

    def queue(self) -> None:
        """Begin to wait on a replica, without KV."""
        self.stage, self.todo = Stage.WAITING, self.need

    def begin_decoding(self, now: float, step_s: float) -> float | None:
        """Begin to decode, with a first step of `step_s` seconds. Returns the pause since the last token, None before a
        first one.
        """
        if self.first_token_s is None:
            # A prefill ends with a token. Without a prefill the first step generates it.
            self.first_token_s = now if self.held > self.job.prompt else now + step_s
        if self.stopped_s is None:
            return None
        pause_s = now - self.stopped_s
        self.stalled_s += pause_s
        self.longest_gap_s = max(self.longest_gap_s, pause_s)
        return pause_s

    def life(self, now: float, alone: tuple[float, float]) -> Life:
        """The statistics of the ended request. `alone`: seconds to its first and last token on an idle replica."""
        first_token_s = now if self.first_token_s is None else min(self.first_token_s, now)
        return Life(
            self.job,
            first_token_s=first_token_s,
            finished_s=now,
            longest_gap_s=self.longest_gap_s,
            stalled_s=self.stalled_s,
            ideal_first_token_s=alone[0],
            ideal_s=alone[1],
            moves=self.moves,
            preemptions=self.preemptions,
            matched=self.matched,
            cached=self.cached or 0,
        )
