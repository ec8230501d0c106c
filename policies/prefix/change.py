"""Changes of the KV blocks that a replica keeps.

A block's name is vLLM's chained hash of its tokens, of all tokens before them, of the salt and of the adapter: its low
64 bits, as an integer. Equal names stand for equal KV on every replica of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """A memory in which a replica keeps KV blocks: that of the accelerator, or that of the host."""

    HBM = "hbm"
    DRAM = "dram"


@dataclass(frozen=True, slots=True)
class CacheChange:
    """The names of blocks that a replica has stored and removed since its previous change, by tier.

    No name of a tier is in both. If the change is `whole`, the replica has the `stored` blocks and no others: earlier
    changes no longer count. A missing tier has no changes.
    """

    stored: Mapping[Tier, tuple[int, ...]]
    removed: Mapping[Tier, tuple[int, ...]]
    whole: bool
