"""Engines without a model: the next token is a function of the context, and KV blocks hold the tokens themselves.

The engine reads the context from its blocks, also from loaded ones, so corrupted blocks change the output as in a real
engine.
"""

import asyncio
import contextlib
import hashlib
import struct
from collections.abc import Iterator, Sequence

from migration.kv.staging import HEADER, Segments
from migration.protocol.core_messages import Prefilled, encode_logprobs
from migration.protocol.errors import TransferFailed
from migration.protocol.layouts import Extent, Resharding, ShardLayout, heads_of
from migration.protocol.messages import Shard, SlotRef, Tail
from migration.protocol.ports import Slot
from policies.model import Bytes

TOKEN_BYTES = 4
"""Bytes of one token in a block."""

_VOCABULARY = 500
"""The upper end of generated ids: all below are in the vocabulary of the embedded model's tokenizer."""
_FIRST_TOKEN = 3
"""The first generated id: those below are special, and 2 ends a text."""


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens in a block's encoding: 32-bit integers, little-endian."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpack(held: bytes | memoryview) -> tuple[int, ...]:
    """The inverse of `pack`."""
    return struct.unpack(f"<{len(held) // TOKEN_BYTES}i", held)


def token_layouts(block_size: int, workers: int = 1) -> tuple[ShardLayout, ...]:
    """The shards of a block of packed tokens: its bytes take the place of heads."""
    heads = (heads_of(rank, workers, block_size * TOKEN_BYTES) for rank in range(workers))
    return tuple(ShardLayout(Extent(0, 1), own, block_size, "int32", "packed", 0, own.size) for own in heads)


class ContextDigest:
    """A running digest of a context's packed tokens, which determines the next token, in constant time per token."""

    def __init__(self, held: bytes = b"") -> None:
        self._digest = hashlib.blake2b(held, digest_size=4)

    def extend(self, held: bytes) -> None:
        """Append packed tokens to the context."""
        self._digest.update(held)

    def next_token(self) -> int:
        """The token after the context."""
        return _FIRST_TOKEN + self._drawn() % (_VOCABULARY - _FIRST_TOKEN)

    def next_logprobs(self, top: int, prefilled: Prefilled | None = None) -> bytes:
        """An output with the logprobs of the next token and the `top` likeliest ones, also determined by the context.

        The next token is the likeliest one; the tokens with the following ids have falling logprobs. `prefilled` is
        part of the output.
        """
        first, best = self.next_token() - _FIRST_TOKEN, -(self._drawn() % 512) / 256
        ids = [_FIRST_TOKEN + (first + i) % (_VOCABULARY - _FIRST_TOKEN) for i in range(top)]
        return encode_logprobs([self.next_token(), *ids], [best, *(best - i / 4 for i in range(top))], prefilled)

    def _drawn(self) -> int:
        return int.from_bytes(self._digest.digest(), "little")


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The output of an undisturbed run."""
    digest, outputs = ContextDigest(pack(prompt)), []
    for _ in range(count):
        outputs.append(digest.next_token())
        digest.extend(pack(outputs[-1:]))
    return tuple(outputs)


class StagedLoad:
    """A load under way: the parts that have arrived, in any order."""

    def __init__(self, first: int, last: int, block_bytes: int) -> None:
        self._first = first
        self._missing = set(range(first, last))
        self._held = bytearray((last - first) * block_bytes)
        self._block_bytes = block_bytes
        self._whole = asyncio.Event()

    def put(self, first: int, held: bytes) -> None:
        """Blocks from index `first` of the context on have arrived."""
        offset = (first - self._first) * self._block_bytes
        self._held[offset : offset + len(held)] = held
        self._missing.difference_update(range(first, first + len(held) // self._block_bytes))
        if not self._missing:
            self._whole.set()

    @property
    def missing(self) -> int:
        """The number of blocks that have not arrived."""
        return len(self._missing)

    async def whole(self) -> bytes:
        """Wait for the last part; all blocks, packed."""
        if self._missing:
            await self._whole.wait()
        return bytes(self._held)


class TokenSlots:
    """Writes blocks of packed tokens into staging slots, and reads them from slots into loads and tails.

    As with real workers, each of `workers` slots takes a shard of every block, of `shard_bytes`.
    """

    def __init__(self, shard_bytes: int, workers: int = 1) -> None:
        self._shard_bytes = shard_bytes
        self._workers = workers
        self._segments = Segments()
        self._tickets = iter(range(1, 1 << 62))
        self._loads: dict[str, StagedLoad] = {}
        self._tails: dict[str, bytes] = {}
        self._expected: set[str] = set()

    @contextlib.contextmanager
    def loading(self, load: str, first: int, last: int) -> Iterator[StagedLoad]:
        """The load `load` of blocks [first, last), which takes parts until the end of the context."""
        self._loads[load] = StagedLoad(first, last, self._workers * self._shard_bytes)
        try:
            yield self._loads[load]
        finally:
            del self._loads[load]

    def missing(self, load: str) -> int | None:
        """The number of a load's blocks that have not arrived; None without such a load."""
        return self._loads[load].missing if load in self._loads else None

    def put(self, load: str, first: int, last: int, slots: Sequence[SlotRef], cuts: Resharding | None = None) -> None:
        """Copy staged blocks [first, last) into a load; with `cuts`, of slots of an engine with other workers.

        Raises:
            TransferFailed: the load has ended, or a slot does not carry its ticket.
        """
        if load not in self._loads:
            raise TransferFailed("the load has ended")
        self._loads[load].put(first, self._read(slots, last - first, cuts))

    def expect(self, tail: str) -> None:
        """Let a tail be held, until `take` or `discard`."""
        self._expected.add(tail)

    def hold(self, tail: Tail, block_size: int, slots: Sequence[SlotRef], cuts: Resharding | None = None) -> None:
        """Copy a staged tail into memory. Raises TransferFailed if it is not expected, or a slot has another ticket."""
        if tail.name not in self._expected:
            raise TransferFailed("the tail is not expected")
        held = self._read(slots, tail.last(block_size) - tail.first, cuts)
        self._tails[tail.name] = held[: (tail.tokens - tail.first * block_size) * TOKEN_BYTES]

    def take(self, tail: Tail | None) -> bytes:
        """The packed tokens of a held tail, which is not held any more; empty without one."""
        return self.discard(tail.name) if tail is not None else b""

    def discard(self, tail: str) -> bytes:
        """Expect a tail no more; its packed tokens if it was held."""
        self._expected.discard(tail)
        return self._tails.pop(tail, b"")

    @property
    def held_tails(self) -> int:
        """The number of held tails."""
        return len(self._tails)

    def _read(self, slots: Sequence[SlotRef], count: int, cuts: Resharding | None) -> bytes:
        """`count` blocks, put together from the workers' shards."""
        if cuts is not None:
            return self._read_cut(slots, count, cuts)
        size = self._shard_bytes
        shards = [bytes(self._segments.payload(slot, count * size)) for slot in slots]
        return b"".join(shard[i * size : (i + 1) * size] for i in range(count) for shard in shards)

    def _read_cut(self, slots: Sequence[SlotRef], count: int, cuts: Resharding) -> bytes:
        size = self._shard_bytes
        block = self._workers * size
        read = bytearray(count * block)
        for cut in cuts.cuts:
            part, staged = cut.part, size if cut.part is None else cut.part.staged_heads
            shard = bytes(self._segments.payload(slots[cut.shard], count * staged))
            begin, to, width = (part.from_head, part.to_head, part.heads) if part is not None else (0, 0, size)
            for i in range(count):
                place = i * block + cut.worker * size + to
                read[place : place + width] = shard[i * staged + begin : i * staged + begin + width]
        return bytes(read)

    def write(self, slots: Sequence[Slot], held: bytes, checked: bool = False) -> list[Shard]:
        """Write blocks into a slot of each worker, the last one padded if it is not full; `checked`: with checksums.

        Raises:
            TransferFailed: the blocks do not fit, or a segment's process has ended.
        """
        size = self._shard_bytes
        held += bytes(-len(held) % (self._workers * size))
        shards = [held[i : i + size] for i in range(0, len(held), size)]
        ranks = enumerate(slots)
        return [self._write(slot, b"".join(shards[rank :: self._workers]), checked) for rank, slot in ranks]

    def _write(self, slot: Slot, held: bytes, checked: bool) -> Shard:
        memory = self._segments.get(slot.segment)
        memory.view(slot.offset + HEADER, len(held))[:] = held
        ticket = next(self._tickets)
        memory.stamp(slot.offset, ticket, len(held) if checked else 0)
        return Shard(SlotRef(slot.segment, slot.offset, ticket), Bytes(HEADER + len(held)))
