"""The messages between source and target, in the order of a migration.

    source -> target   Prepare    ->  Prepared
                       CopyRound  ->  blocks loaded   (any number; none on the token path)
                       renew      ->  nothing         (while a prefill has no more blocks to copy)
                       Chunk      ->  blocks copied   (a round's, while it is loaded, and the tail's, behind the rounds;
                                                       unless the target's workers take the blocks by themselves)
                       Adopt      ->  nothing         (the target runs the request under the new hop)
                       cancel, by migration id
                       resumed    ->  seconds from the adoption to its first token, once that is out

Token ids travel once: `Prepare` carries those so far, every round and `Adopt` only the newer ones.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from migration.protocol.layouts import Resharding, ShardLayout
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

    `model` names the weights by all that they follow from (files, revision, quantization, dtype), tokenizer and
    version; `cache` adds the dtype of KV and the block size. It is empty if no blocks can be moved.
    `layouts` are the shards of every block, by the ranks of the engine's workers. They may be unlike.
    """

    model: str
    cache: str
    block_size: int
    layouts: tuple[ShardLayout, ...]

    @property
    def workers(self) -> int:
        """The number of the engine's workers."""
        return len(self.layouts)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the largest shard of a block."""
        return max((layout.block_bytes for layout in self.layouts), default=0)

    @property
    def block_bytes(self) -> Bytes:
        """Bytes of a KV block: of its shards together."""
        return Bytes(sum(layout.block_bytes for layout in self.layouts))


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A staging slot in shared memory: `segment` is a path that any process of the node can map.

    `ticket` identifies the content: a reader that finds another ticket before or after its read has read other
    bytes.
    """

    segment: str
    offset: int
    ticket: int


class Shard(NamedTuple):
    """One worker's part of staged blocks: `size` bytes in `slot`, header included."""

    slot: SlotRef
    size: Bytes


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a context's KV: the blocks from index `first` on, which hold the KV of its first `tokens` tokens.

    The last block need not be full. `name` is never reused.
    """

    name: str
    first: Blocks
    tokens: int

    def last(self, block_size: int) -> Blocks:
        """The index behind the last block."""
        return Blocks(-(-self.tokens // block_size))


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

    def without(self, present: Blocks) -> "CopyRound | None":
        """The round without the first `present` blocks of the context; None if no block is left."""
        if present >= self.last:
            return None
        return replace(self, first=max(self.first, present))


@dataclass(frozen=True, slots=True)
class Prepare:
    """Ask the target to make room for a request.

    If it can come by KV, the target begins to load `first_round` at once, without the blocks that are present; the
    source sends it as soon as it knows.
    """

    migration: str
    spec: RequestSpec
    hop: int
    next_hop: int
    source: ReplicaId
    path: PathRequest
    fingerprint: Fingerprint
    outputs: tuple[int, ...]
    first_round: CopyRound | None = None

    @property
    def copies(self) -> bool:
        """True if only blocks come, and no request."""
        return self.hop == self.next_hop


@dataclass(frozen=True, slots=True)
class Prepared:
    """The target reserved room; `path` is the best it can do.

    It has the first `present` full blocks of the context already, as far as it knows: these need not be sent. Those
    that it has lost meanwhile it computes. If its workers read staging slots of the same node, `workers` are their
    addresses, in the order of their ranks. If they hold other layers or heads than the source's, `cuts` are the parts
    of the source's shards that they take. Its staging slots take chunks of at most `chunk` blocks; None: of any number.
    `reason` is why blocks cannot come, if the source would send them.

    Without a message for `lease_s` seconds the target frees all that it holds.
    """

    path: Path
    lease_s: float
    workers: tuple[str, ...] = ()
    present: Blocks = Blocks(0)
    cuts: Resharding | None = None
    chunk: Blocks | None = None
    reason: str = ""


def tail_name(migration: str) -> str:
    """The name of a migration's tail at the target's engine."""
    return f"{migration}.tail"


def load_name(migration: str, round: int) -> str:
    """The name of the load of a migration's round at the target's engine."""
    return f"{migration}.{round}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks [first, last) of a round, staged in slots of the source. It may arrive before its round.

    With a `tail`, the blocks are this one's, and belong to no round.

    Shards and channels are in the order of the ranks of the workers that send: the shard of a rank goes through the
    channel of the same rank. The worker of the same rank takes it or, if the layouts are unlike, those whose
    `Prepared.cuts` are of it.
    """

    migration: str
    round: int
    first: Blocks
    last: Blocks
    shards: tuple[Shard, ...]
    channels: tuple[str, ...]
    tail: Tail | None = None

    @property
    def size(self) -> Bytes:
        """Bytes to transfer, headers included."""
        return Bytes(sum(shard.size for shard in self.shards))


@dataclass(frozen=True, slots=True)
class Adopt:
    """Continue the request: its output tokens are those of earlier messages plus these.

    The target's workers hold the `tail`, if one was sent.
    """

    migration: str
    outputs_from: int
    outputs: tuple[int, ...]
    tail: Tail | None = None
