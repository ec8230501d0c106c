"""The conditions of an epoch: the bounds of its decisions, as one value that does not change within the epoch."""

from dataclasses import dataclass
from math import inf

from policies.cost.service import SpeedLimit


@dataclass(frozen=True, slots=True)
class EpochConditions:
    """The conditions of an epoch; by default, no bounds.

    Every replica keeps `headroom` tokens free for the growth of each request. `lead`, at most the headroom, is a
    request's growth until a decision takes effect. `speed` limits the steps of every replica (None: no limit).

    At most `moves` requests change their replica. The cluster keeps `slack` tokens free. A `forecast` is the expected
    change of demand in tokens, with its spread; then the slack is that, if it is a rise, and replicas close only while
    `peak` tokens stay free, which the next start needs more likely than not. Of the sizes of waiting requests, the
    share `queue_share` counts as demand. One of them opens a replica of its own only if the pool `opens_for_requests`.

    At least `min_replicas` stay open, and `level_replicas`, the least number that keeps a service level. While the pool
    `awaits_start` of a replica, no replica is emptied or closed: another one would soon be opened again.
    """

    headroom: int = 0
    lead: int = 0
    speed: SpeedLimit | None = None
    moves: float = inf
    slack: int = 0
    forecast: int | None = None
    peak: int = 0
    opens_for_requests: bool = True
    queue_share: float = 1.0
    min_replicas: int = 0
    level_replicas: int = 0
    awaits_start: bool = False


UNBOUNDED = EpochConditions()
"""The conditions before the first epoch."""
