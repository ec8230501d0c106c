"""The use of an engine's KV blocks, and its prefix cache as operators see it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from deployments.cache.mirror import Mirror
from migration.protocol.core_messages import Prefilled
from policies.model import Blocks
from policies.prefix.change import Tier

_NO_BLOCKS = Blocks(0)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks by their use: `active` ones belong to requests, `historical` ones are free and can still be found.

    `blank` ones are free, and nothing in them can be found. `pinned` ones belong to none and are not evicted.
    """

    active: Blocks
    historical: Blocks
    blank: Blocks
    pinned: Blocks = _NO_BLOCKS


def occupancy(total: Blocks, free: Blocks, named: int, partial: int) -> Occupancy:
    """The use of `total` blocks, of which `free` belong to no request, and `named` can be found by their names.

    All blocks of requests have a name but the `partial` ones, which are not full. The numbers are not of exactly one
    moment, so historical blocks may be wrong by a few while requests run.
    """
    active = total - free
    historical = min(free, max(0, named - max(0, active - partial)))
    return Occupancy(Blocks(active), Blocks(historical), Blocks(free - historical))


class Recomputed(StrEnum):
    """How a recomputation of a cached context ended."""

    EQUAL = "equal"
    DIFFERENT = "different"
    """The blocks were wrong, and are deleted."""
    SKIPPED = "skipped"
    """The blocks had left the cache, or the engine could not compute both."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """A replica's prefix cache.

    `off` is the reason why its contents are not known; `used` has no tiers then. Otherwise they follow from the
    engine's events up to batch `version`, and they are `exact` unless some were lost. `resyncs` count the repairs by
    reason. `prompts` are all prompts of requests that began on the replica.
    """

    off: str | None
    used: Mapping[Tier, Occupancy]
    """By tier; without a tier of host memory, that of the accelerator alone. No block of the host's is active."""
    version: int
    exact: bool
    resyncs: dict[str, int]
    prompts: Prefilled

    def to_json(self) -> dict[str, Any]:
        """The member `cache` of a replica in `/mell/state`."""
        blocks: dict[str, Any] = {tier.value: asdict(self.used[tier]) if tier in self.used else None for tier in Tier}
        return {
            **blocks,
            "version": self.version,
            "exact": self.exact,
            "off": self.off,
            "prompt_tokens": {"all": self.prompts.prompt, **self.delivered},
        }

    @property
    def delivered(self) -> dict[Tier, int]:
        """The tokens of prompts that were not computed, by the tier that had them."""
        return {Tier.HBM: self.prompts.cached - self.prompts.loaded, Tier.DRAM: self.prompts.loaded}


def cache_report(
    mirror: Mirror,
    total: Blocks,
    free: Blocks,
    partial: int,
    prompts: Prefilled,
    host: Blocks = _NO_BLOCKS,
    pinned: Blocks = _NO_BLOCKS,
) -> CacheReport:
    """The report on an engine's cache, whose tier of host memory has `host` blocks, some of them `pinned`.

    The rest is as in `occupancy`.
    """
    used: dict[Tier, Occupancy] = {}
    if mirror.off is None:
        used[Tier.HBM] = occupancy(total, free, mirror.hbm.blocks, partial)
    if host:
        kept = min(host, mirror.dram.blocks)
        pinned = Blocks(min(pinned, kept))
        used[Tier.DRAM] = Occupancy(_NO_BLOCKS, Blocks(kept - pinned), Blocks(host - kept), pinned)
    resyncs = {str(reason): count for reason, count in mirror.resyncs.items()}
    return CacheReport(mirror.off, used, mirror.version, mirror.exact, resyncs, prompts)
