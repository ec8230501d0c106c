"""The reasons for the number of replicas after an epoch, as values for operators."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from policies.cluster.capacity import is_starting, may_close, spare_capacity
from policies.cluster.cluster import Cluster


class ScaleUp(StrEnum):
    """The reason for opening replicas.

    MINIMUM: fewer than the minimum are up. PREFILLS: fewer are up than keep prefills rare enough for the service
    level's times between tokens. REQUESTS: requests find no room, also not on a starting replica. RESERVE: less
    capacity is free than is kept in reserve.
    """

    MINIMUM = "minimum"
    PREFILLS = "prefills"
    REQUESTS = "requests"
    RESERVE = "reserve"


class ScaleDownBlock(StrEnum):
    """The reason why no replica is closed.

    MINIMUM: no more than the minimum are running. STARTING: a replica is starting. PREFILLS: on one replica less,
    prefills would lengthen too many of the steps for the service level. RESERVE: with one replica less, less capacity
    would be free than is kept in reserve. LINGER: an empty replica stays open for a while. IN_USE: no replica is empty,
    and none can be emptied within the limits of moves.
    """

    MINIMUM = "minimum"
    STARTING = "starting"
    PREFILLS = "prefills"
    RESERVE = "reserve"
    LINGER = "linger"
    IN_USE = "in_use"


@dataclass(frozen=True, slots=True)
class Scaled:
    """The openings and closings of the epoch at `at`, in seconds.

    A reason in `up` without `opened` replicas means that no more may be opened. An empty replica stays open for
    `linger_s` seconds.
    """

    at: float
    up: ScaleUp | None = None
    opened: int = 0
    closed: int = 0
    linger_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """The reasons with their numbers; `kept` is None if replicas are closed.

    `level_replicas` is the least number of replicas that keeps the service level, 0 without one. `free_replicas` is the
    capacity that is free after all starts and moves under way, less that of the `waiting_requests`; `reserve_replicas`
    is the capacity to keep free. `linger_left_s` are the seconds until an empty replica may be closed, None without
    one.
    """

    up: ScaleUp | None
    kept: ScaleDownBlock | None
    opened: int
    closed: int
    replicas: int
    min_replicas: int
    level_replicas: int
    waiting_requests: int
    free_replicas: float
    reserve_replicas: float
    linger_left_s: float | None

    def to_json(self) -> dict[str, Any]:
        """The member `scaling` of `/mell/state`."""
        return asdict(self)


def scaling_report(cluster: Cluster, scaled: Scaled) -> ScalingReport:
    """The reasons for the present number of replicas."""
    idle = [replica.idle_since for replica in cluster.running() if replica.idle_since is not None]
    linger_left_s = max(0.0, min(idle) + scaled.linger_s - scaled.at) if idle else None
    free = spare_capacity(cluster)
    return ScalingReport(
        scaled.up,
        None if scaled.closed else _block(cluster, linger_left_s),
        scaled.opened,
        scaled.closed,
        cluster.up(),
        cluster.conditions.min_replicas,
        cluster.conditions.level_replicas,
        len(cluster.waiting),
        free / cluster.capacity,
        cluster.conditions.slack / cluster.capacity,
        linger_left_s,
    )


def _block(cluster: Cluster, linger_left_s: float | None) -> ScaleDownBlock:
    if len(cluster.running()) <= cluster.conditions.min_replicas:
        return ScaleDownBlock.MINIMUM
    if is_starting(cluster):
        return ScaleDownBlock.STARTING
    if len(cluster.running()) <= cluster.conditions.level_replicas:
        return ScaleDownBlock.PREFILLS
    if not may_close(cluster):
        return ScaleDownBlock.RESERVE
    return ScaleDownBlock.IN_USE if linger_left_s is None else ScaleDownBlock.LINGER
