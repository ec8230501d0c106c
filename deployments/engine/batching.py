"""The scheduler of a paced engine: vLLM's in small, free of time.

There are no prefill and decode phases: a request has computed tokens, and tokens still to be computed. When all are
computed, the step yields its next token. Requests are admitted first come first served, or by priority, if there are
blocks for their whole context. If a running request lacks a block, the youngest one, or that of the highest priority
number, is preempted, and recomputed later.
"""

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from deployments.engine.blocks import Block, BlockPool
from deployments.engine.pace import Pace
from deployments.engine.tokens import TOKEN_BYTES, ContextDigest, pack
from policies.cost.steps import PrefillChunk
from policies.prefix.names import digests


@dataclass(slots=True, eq=False)
class BatchedSequence:
    """One run of one request; it ends when its context has `end` tokens.

    `priority` is 0 for all requests unless the engine schedules by priority.
    """

    key: str
    context: list[int]
    end: int
    priority: int = 0
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Those of the context's first full blocks, computed on demand."""
    salt: str | None = None
    """A text that keeps the blocks of equal contexts apart."""
    reads_cache: bool = True
    cached: int | None = None
    """The number of tokens that the prefix cache had when the run was admitted first."""
    digest: ContextDigest = field(default_factory=ContextDigest)
    """The digest of the computed blocks."""
    tail: bytes = b""
    """Packed content of the blocks from index `tail_first` on, for the first step."""
    tail_first: int = 0

    @property
    def todo(self) -> int:
        """The number of tokens still to be computed."""
        return len(self.context) - self.computed


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One engine step: the requests in the order of their admission, each with the number of tokens to compute.

    Of these, `decodes` requests with `context` tokens in total decode; `prefills` are the chunks of the others.
    """

    chunks: tuple[tuple[BatchedSequence, int], ...] = ()
    decodes: int = 0
    context: int = 0
    prefills: tuple[PrefillChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """The token that a step yields for one request; `last` if the run ends with it."""

    sequence: BatchedSequence
    token: int
    last: bool


_priority = attrgetter("priority")


class BatchScheduler:
    """The running and waiting requests of one engine, and its blocks."""

    def __init__(self, pace: Pace) -> None:
        self.pool = BlockPool(pace.num_gpu_blocks_override)
        self.running: list[BatchedSequence] = []
        self.waiting: deque[BatchedSequence] = deque()
        self.preemptions = 0
        self._pace = pace
        self._size = pace.block_size

    def add(self, sequence: BatchedSequence) -> None:
        """Add an arriving request."""
        insort_right(self.waiting, sequence, key=_priority)

    def remove(self, sequence: BatchedSequence) -> None:
        """Remove a request, if it is still here."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def begin(self) -> EngineStep | None:
        """Schedule the next step; None if there is nothing to compute."""
        left = self._pace.max_num_batched_tokens
        chunks: list[tuple[BatchedSequence, int]] = []
        before = self.preemptions
        for sequence in list(self.running):
            if left and sequence.blocks and self._make_room(sequence):
                chunks.append((sequence, min(sequence.todo, left)))
                left -= chunks[-1][1]
        chunks = [chunk for chunk in chunks if chunk[0].blocks]  # by priority, any other one may have been preempted
        while left and self.preemptions == before and self._admit():
            sequence = self.running[-1]
            chunks.append((sequence, min(sequence.todo, left)))
            left -= chunks[-1][1]
        if not chunks:
            return None
        decoding = [sequence for sequence, _ in chunks if sequence.todo == 1]
        return EngineStep(
            tuple(chunks),
            len(decoding),
            sum(len(sequence.context) for sequence in decoding),
            tuple(PrefillChunk(count, sequence.computed) for sequence, count in chunks if sequence.todo != 1),
        )

    def end(self, step: EngineStep) -> Iterator[Token]:
        """Complete a step; yields the new tokens of the requests that are still here."""
        here = set(self.running)
        for sequence, count in step.chunks:
            if sequence not in here:
                continue
            self._compute(sequence, count)
            if not sequence.todo:
                token = sequence.digest.next_token()
                sequence.context.append(token)
                last = len(sequence.context) >= sequence.end
                if last:
                    self.remove(sequence)
                yield Token(sequence, token, last)

    def held(self, sequence: BatchedSequence, first: int, last: int) -> bytes | None:
        """The packed content of blocks [first, last); None unless all of them are computed."""
        if last * self._size > sequence.computed:
            return None
        return b"".join(block.held for block in sequence.blocks[first:last])

    def held_tail(self, sequence: BatchedSequence, first: int, tokens: int) -> bytes | None:
        """The packed content of the blocks from `first` on, up to `tokens` tokens; None unless these are computed."""
        if tokens > sequence.computed:
            return None
        held = b"".join(block.held for block in sequence.blocks[first:])
        return held[: (tokens - first * self._size) * TOKEN_BYTES]

    def present(self, context: list[int], salt: str | None) -> int:
        """The number of the context's first full blocks that the prefix cache has."""
        return len(self.pool.match(digests(context, self._size, salt)))

    def take_in(self, context: list[int], first: int, held: bytes, salt: str | None = None) -> int | None:
        """Put packed blocks, from index `first` of the context on, into the prefix cache.

        Returns the number of new blocks: 0 if blocks before them are missing, None if there is no room for them.
        """
        sequence = BatchedSequence("", context, len(context), salt=salt)
        size = self._size * TOKEN_BYTES
        last = first + len(held) // size
        sequence.blocks = self.pool.match(self._digests(sequence, last))
        present = len(sequence.blocks)
        if present < first:
            return 0
        if self.pool.room_beside(sequence.blocks) < last - present:
            return None
        self.pool.claim(sequence.blocks)
        for index in range(present, last):
            block = self._allocate(sequence)
            block.held += held[(index - first) * size : (index - first + 1) * size]
            self.pool.seal(block, sequence.digests[index])
        self.release(sequence)
        return last - present

    def hold(self, key: str, context: list[int], salt: str | None) -> BatchedSequence:
        """A sequence that uses the context's first blocks that the prefix cache has, until `release`."""
        sequence = BatchedSequence(key, context, len(context), salt=salt)
        sequence.blocks = self.pool.match(self._digests(sequence, len(context) // self._size))
        sequence.computed = len(sequence.blocks) * self._size
        self.pool.claim(sequence.blocks)
        return sequence

    def release(self, sequence: BatchedSequence) -> None:
        """End the use of a sequence's blocks, which stay in the prefix cache."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    # --- inside ---------------------------------------------------------------------------------------

    def _make_room(self, sequence: BatchedSequence) -> bool:
        """Allocate a block for the next token if needed; False if this preempted the request itself."""
        while len(sequence.blocks) * self._size < len(sequence.context):
            if self.pool.free > 0:
                self._allocate(sequence)
                continue
            last = max(reversed(self.running), key=_priority)
            self.running.remove(last)
            self.release(last)
            insort_left(self.waiting, last, key=_priority)
            self.preemptions += 1
            if last is sequence:
                return False
        return True

    def _admit(self) -> bool:
        """Admit the first waiting request if there is room; its cached blocks count as computed. False if not."""
        if not self.waiting or len(self.running) >= self._pace.max_num_seqs:
            return False
        sequence = self.waiting[0]
        # The last token is always computed, since this yields the next one.
        usable = (len(sequence.context) - 1) // self._size if sequence.reads_cache else 0
        cached = self.pool.match(self._digests(sequence, usable))
        missing = self._pace.blocks(len(sequence.context)) - len(cached)
        if self.pool.room_beside(cached) < missing:
            return False
        self.running.append(self.waiting.popleft())
        self.pool.claim(cached)
        sequence.blocks = cached
        sequence.computed = len(cached) * self._size
        if sequence.cached is None:
            sequence.cached = sequence.computed
        sequence.digest = ContextDigest(b"".join(block.held for block in cached))
        for _ in range(missing):
            self._allocate(sequence)
        known = sequence.computed - sequence.tail_first * self._size
        if known >= 0:
            self._fill(sequence, sequence.tail[known * TOKEN_BYTES :])
        sequence.tail = b""
        return True

    def _allocate(self, sequence: BatchedSequence) -> Block:
        block = self.pool.allocate()
        assert block is not None, "there was room"
        sequence.blocks.append(block)
        return block

    def _compute(self, sequence: BatchedSequence, count: int) -> None:
        """Write the next `count` tokens into the request's blocks, and seal full blocks."""
        self._fill(sequence, pack(sequence.context[sequence.computed : sequence.computed + count]))

    def _fill(self, sequence: BatchedSequence, tokens: bytes) -> None:
        """Write the next packed tokens into the request's blocks, and seal full blocks."""
        began, end = sequence.computed, sequence.computed + len(tokens) // TOKEN_BYTES
        while sequence.computed < end:
            index = sequence.computed // self._size
            upto = min(end, (index + 1) * self._size)
            held = tokens[(sequence.computed - began) * TOKEN_BYTES : (upto - began) * TOKEN_BYTES]
            sequence.blocks[index].held += held
            sequence.digest.extend(held)
            sequence.computed = upto
            if upto % self._size == 0:
                self.pool.seal(sequence.blocks[index], self._digests(sequence, index + 1)[index])

    def _digests(self, sequence: BatchedSequence, count: int) -> list[bytes]:
        """The digests of a context's first `count` blocks."""
        known = sequence.digests
        if len(known) < count:
            tokens = sequence.context[len(known) * self._size : count * self._size]
            known += digests(tokens, self._size, sequence.salt, known[-1] if known else None)
        return known[:count]
