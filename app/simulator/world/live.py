"""A request in the simulated world: what it has produced, where it is, and what it went through."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from app.simulator.workload.workload import Job
from app.simulator.world.observer import Life
from policies.model import Phase, ReplicaId, RequestId, Tokens

if TYPE_CHECKING:
    from app.simulator.world.batch import Batch


class Stage(StrEnum):
    """What a request is doing."""

    NOWHERE = "nowhere"
    """It waits to be placed, or is between two replicas."""
    WAITING = "waiting"
    """It waits on its replica for room."""
    PREFILL = "prefill"
    DECODE = "decode"
    FROZEN = "frozen"
    """It is being handed over; its blocks are still held."""
    OVER = "over"


@dataclass(slots=True, eq=False)
class Live:
    """One request. `order` counts arrivals.

    Its KV grows by a token with every step of its batch: while it decodes it has `base` tokens plus the batch's steps,
    and is over when these reach `ends`. At any other time it has what `held` says, or needs that much to be resumed.
    `at` is the replica whose request it is; `standing` is what was reported of it last, `told` the size. `todo` are
    tokens that a prefill has still to compute. `stopped_s` is when it last stopped decoding, None until it has decoded.
    """

    job: Job
    order: int
    id: RequestId = field(init=False)
    stage: Stage = Stage.NOWHERE
    at: ReplicaId | None = None
    standing: tuple[ReplicaId | None, Phase, int] | None = None
    batch: "Batch | None" = None
    held: float = 0.0
    told: int = 0
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

    def __post_init__(self) -> None:
        self.id = self.job.id
        self.held = self.told = self.job.prompt

    def tokens(self, now: float) -> float:
        """Tokens of its KV, or those that it needs to be resumed."""
        return self.held if self.batch is None else self.base + self.batch.steps(now)

    @property
    def need(self) -> Tokens:
        """Whole tokens that it needs to be resumed."""
        return Tokens(math.ceil(self.held - 1e-5))

    @property
    def left(self) -> float:
        """Tokens that it has still to produce, as of `held`."""
        return self.job.prompt + self.job.output - self.held

    def queue(self) -> None:
        """It waits on a replica, without KV."""
        self.stage, self.todo = Stage.WAITING, self.need

    def produces(self, now: float, step_s: float) -> None:
        """It decodes from now on, with a first step of `step_s` seconds."""
        if self.first_token_s is None:
            # A prefill ends with a token; without one, the first step brings it.
            self.first_token_s = now if self.held > self.job.prompt else now + step_s
        if self.stopped_s is not None:
            self.stalled_s += now - self.stopped_s
            self.longest_gap_s = max(self.longest_gap_s, now - self.stopped_s)

    def life(self, now: float, alone: tuple[float, float]) -> Life:
        """What it went through, now that it is over. `alone` are its seconds to first and last token if alone."""
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
        )
