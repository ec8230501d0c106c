"""Mode `observe`: keeps a shadow of the cluster, and tells what it comes to."""

import logging
from collections.abc import Iterable
from dataclasses import replace

from deployments.telemetry import Telemetry
from migration.beliefs import Profile
from policies.decision.dry_run import DryRun, said
from policies.decision.observation import Observation
from policies.decision.shadow import Shadow

log = logging.getLogger("ray.serve")

LOG_EVERY_S = 300.0


class Rehearsal:
    """Lives through the scheduler's epochs beside its planner, and carries nothing out."""

    def __init__(self, shadow: Shadow, telemetry: Telemetry) -> None:
        self._shadow = shadow
        self._telemetry = telemetry
        self._profile: Profile | None = None
        self._logged_s = 0.0

    def epoch(self, seen: Observation, profiles: Iterable[Profile | None]) -> None:
        """The next epoch, with what replicas have measured of themselves."""
        self._profile = self._profile or next((profile for profile in profiles if profile), None)
        self._shadow.observe(seen)
        so_far = self.so_far
        if so_far is None:
            return
        self._telemetry.dry_run(so_far)
        if so_far.since_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = so_far.since_s
            log.info("dry run: %s", said(so_far))

    @property
    def so_far(self) -> DryRun | None:
        """What it comes to as of the last epoch, in bytes too if a replica has told how large KV is."""
        so_far = self._shadow.so_far
        if so_far is None or self._profile is None:
            return so_far
        return replace(so_far, moved_bytes=self._profile.size(so_far.moved_tokens))
