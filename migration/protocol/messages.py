"""The messages between source and target, in the order of a migration.

    source -> target   Prepare    ->  Prepared
                       CopyRound  ->  blocks loaded   (any number; none on the token path)
                       Chunk      ->  blocks copied   (a round's, while it is loaded)
                       Adopt      ->  nothing         (the target runs the request under the new hop)
                       cancel, by migration id
                       resumed    ->  seconds from the adoption to its first token, once that is out

Token ids travel once: `Prepare` carries those so far, every round and `Adopt` only the newer ones.
"""

from dataclasses import dataclass
from enum import StrEnum

from migration.protocol.request import RequestSpec
from policies.model import Blocks, Bytes, ReplicaId
from policies.plan import Path


class PathRequest(StrEnum):
    """The paths that a caller allows; AUTO means KV where it is possible, else tokens."""

    AUTO = "auto"
    KV = "kv"
    TOKENS = "tokens"

    @property
    def first(self) -> Path:
        """The path that is tried first."""
        return Path.TOKENS if self is PathRequest.TOKENS else Path.KV


ONLY = {Path.KV: PathRequest.KV, Path.TOKENS: PathRequest.TOKENS}
"""The request for one path and no other."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The properties that two replicas must share: `model` to exchange requests at all, `cache` to exchange KV blocks.

    `model` names weights, revision, tokenizer and sampler; `cache` adds dtype, block size, layout and versions.
    `slot_bytes` and `block_bytes` give the capacity of a staging slot.
    """

    model: str
    cache: str
    block_size: int
    block_bytes: int
    slot_bytes: int

    @property
    def blocks_per_slot(self) -> Blocks:
        """KV blocks that one staging slot holds."""
        return Blocks(self.slot_bytes // self.block_bytes)


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A staging slot in shared memory: `segment` is a path that any process of the node can map.

    `ticket` identifies the content: a reader that finds another ticket before or after its read has read other
    bytes.
    """

    segment: str
    offset: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Ask the target to make room for a request."""

    migration: str
    spec: RequestSpec
    hop: int
    next_hop: int
    source: ReplicaId
    path: PathRequest
    fingerprint: Fingerprint
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The target reserved room; `path` is the best it can do."""

    path: Path


@dataclass(frozen=True, slots=True)
class CopyRound:
    """Load blocks [first, last), which come as chunks; `outputs` are the tokens that came since.

    Rounds count from 1.
    """

    migration: str
    number: int
    first: Blocks
    last: Blocks
    outputs_from: int
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks [first, last) of a round: `size` bytes in the source's slot. It may arrive before its round."""

    migration: str
    round: int
    first: Blocks
    last: Blocks
    size: Bytes
    staged: SlotRef
    channel: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Continue the request: its output tokens are those of earlier messages plus these."""

    migration: str
    outputs_from: int
    outputs: tuple[int, ...]
