"""Mode `observe`: the figures of what the mode `act` would do, as metrics, in the log, and in `/mell/state`."""

import logging
from typing import Any

from deployments.metrics.telemetry import Telemetry
from policies.decision.observation import PoolReport
from policies.model import ReplicaId, RequestId
from policies.plan import Proposal, Reason

log = logging.getLogger("ray.serve")

LOG_EVERY_S = 300.0
"""The time between two log lines, in seconds of the dry run."""

_DURATIONS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


class DryRun:
    """Follows the proposals of one pool. Evacuations do not count, since every mode carries them out.

    Nobody carries proposals out, so epoch after epoch proposes the same moves. Each counts once until its request
    leaves its replica.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._began: float | None = None
        self._since_s = 0.0
        self._logged_s = 0.0
        self._replicas_now = 0
        self._replicas_needed = 0
        self._moves = 0
        self._counted: dict[RequestId, ReplicaId] = {}

    def add_epoch(self, seen: PoolReport, proposal: Proposal, replicas: int, now: float) -> None:
        """Add an epoch's observation and proposal. `replicas` are running or starting."""
        self._began = now if self._began is None else self._began
        self._since_s = now - self._began
        self._replicas_now, self._replicas_needed = replicas, proposal.replicas_needed
        self._forget_departed(seen)
        moves = [move for move in proposal.moves if move.reason is not Reason.EVACUATE]
        fresh = {move.request: move.source for move in moves if self._counted.get(move.request) != move.source}
        self._counted |= fresh
        self._moves += len(fresh)
        self._telemetry.dry_run(proposal.replicas_needed, len(fresh))
        if self._since_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = self._since_s
            log.info("dry run: %s", self.summary())

    def _forget_departed(self, seen: PoolReport) -> None:
        """Forget the requests that have ended, or left the replica of the counted move."""
        counted = self._counted
        for request in seen.gone:
            counted.pop(request, None)
        there = {resident.load.id: resident.replica for resident in seen.requests}
        if seen.whole:
            self._counted = {request: source for request, source in counted.items() if there.get(request) == source}
            return
        for request, replica in there.items():
            if counted.get(request, replica) != replica:
                del counted[request]

    def to_json(self) -> dict[str, Any] | None:
        """The member `dry_run` of `/mell/state`; None before the first epoch."""
        if self._began is None:
            return None
        return {
            "since_s": self._since_s,
            "replicas_now": self._replicas_now,
            "replicas_needed": self._replicas_needed,
            "moves": self._moves,
            "said": self.summary(),
        }

    def summary(self) -> str:
        """The figures for people: "would run 3 replicas instead of 5, with 212 moves in 41 minutes"."""
        now, needed = self._replicas_now, self._replicas_needed
        replicas = f"would run {_counted(needed, 'replica')}" + ("" if needed == now else f" instead of {now}")
        return f"{replicas}, with {_counted(self._moves, 'move')} in {_duration(self._since_s)}"


def _duration(seconds: float) -> str:
    """The duration in the largest unit that gives a number of at least two."""
    for unit_s, name in _DURATIONS:
        if seconds >= 2 * unit_s:
            return _counted(round(seconds / unit_s), name)
    return _counted(round(seconds), "second")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
