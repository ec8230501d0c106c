"""The batch of a paced engine: requests whose KV blocks hold their tokens, free of time.

A request is admitted if there are blocks for its whole context. A running one takes a further block when it needs one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from deployments.engine.pace import Pace
from deployments.engine.tokens import TOKEN_BYTES, ContextDigest, pack
from policies.cost.steps import PrefillChunk
from policies.engine.batching import BatchScheduler, divide
from policies.engine.blocks import Block, BlockPool
from policies.prefix.names import digests, name_of


@dataclass(slots=True, eq=False)
class TokenBlock(Block):
    """A block with its content, packed tokens."""

    held: bytearray = field(default_factory=bytearray)


@dataclass(slots=True, eq=False)
class BatchedSequence:
    """One run of one request; it ends when its context has `end` tokens.

    `turn` is 0 for all requests unless the engine schedules by priority.
    """

    id: str
    context: list[int]
    end: int
    turn: float = 0
    computed: int = 0
    blocks: list[TokenBlock] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    """The names of the context's first full blocks, computed on demand, and in `named` the digest of the last one."""
    named: bytes | None = None
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


class TokenBatch:
    """The running and waiting requests of one engine, and its blocks."""

    def __init__(self, pace: Pace) -> None:
        self.pool = BlockPool(pace.num_gpu_blocks_override, TokenBlock)
        self.scheduler: BatchScheduler[BatchedSequence] = BatchScheduler(pace.max_num_seqs)
        self._pace = pace
        self._size = pace.block_size

    def remove(self, sequence: BatchedSequence) -> None:
        """Remove a request, if it is still here."""
        if self.scheduler.remove(sequence):
            self.release(sequence)

    def begin(self) -> EngineStep | None:
        """Schedule the next step; None if there is nothing to compute."""
        before = self.scheduler.preemptions
        while self._missing() > max(0, self.pool.free):
            self.scheduler.preempt(self.release)
        running = list(self.scheduler.running.values())
        for sequence in running:
            self._allocate(sequence, self._lacks(sequence))
        # Room of preempted requests is theirs: none is admitted before the next step.
        admitted = iter(self._admit, None) if self.scheduler.preemptions == before else ()
        chunks = tuple(divide(chain(running, admitted), self._pace.max_num_batched_tokens))
        if not chunks:
            return None
        decoding = [sequence for sequence, _ in chunks if sequence.todo == 1]
        return EngineStep(
            chunks,
            len(decoding),
            sum(len(sequence.context) for sequence in decoding),
            tuple(PrefillChunk(count, sequence.computed) for sequence, count in chunks if sequence.todo != 1),
        )

    def end(self, step: EngineStep) -> Iterator[Token]:
        """Complete a step; yields the new tokens of the requests that are still here."""
        for sequence, count in step.chunks:
            if self.scheduler.running.get(sequence.id) is not sequence:
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
        return len(self.pool.match(map(name_of, digests(context, self._size, salt))))

    def take_in(self, context: list[int], first: int, held: bytes, salt: str | None = None) -> int | None:
        """Put packed blocks, from index `first` of the context on, into the prefix cache.

        Returns the number of new blocks: 0 if blocks before them are missing, None if there is no room for them.
        """
        sequence = BatchedSequence("", context, len(context), salt=salt)
        size = self._size * TOKEN_BYTES
        last = first + len(held) // size
        sequence.blocks = self.pool.match(self._names(sequence, last))
        present = len(sequence.blocks)
        if present < first:
            return 0
        if self.pool.room_beside(sequence.blocks) < last - present:
            return None
        self.pool.claim(sequence.blocks)
        for index in range(present, last):
            self._allocate(sequence, 1)
            sequence.blocks[index].held += held[(index - first) * size : (index - first + 1) * size]
            self.pool.enter(sequence.blocks[index], sequence.names[index])
        self.release(sequence)
        return last - present

    def hold(self, hold: str, context: list[int], salt: str | None) -> BatchedSequence:
        """A sequence that uses the context's first blocks that the prefix cache has, until `release`."""
        sequence = BatchedSequence(hold, context, len(context), salt=salt)
        sequence.blocks = self.pool.match(self._names(sequence, len(context) // self._size))
        sequence.computed = len(sequence.blocks) * self._size
        self.pool.claim(sequence.blocks)
        return sequence

    def release(self, sequence: BatchedSequence) -> None:
        """End the use of a sequence's blocks, which stay in the prefix cache."""
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    # --- inside ---------------------------------------------------------------------------------------

    def _lacks(self, sequence: BatchedSequence) -> int:
        """The number of blocks that a request lacks for its context."""
        return self._pace.blocks(len(sequence.context)) - len(sequence.blocks)

    def _missing(self) -> int:
        """The number of blocks that running requests lack for the next step."""
        return sum(self._lacks(sequence) for sequence in self.scheduler.running.values())

    def _cached(self, sequence: BatchedSequence) -> list[TokenBlock]:
        """The blocks of a waiting request in the prefix cache."""
        # The last token is always computed, since this yields the next one.
        usable = (len(sequence.context) - 1) // self._size if sequence.reads_cache else 0
        return self.pool.match(self._names(sequence, usable))

    def _admit(self) -> BatchedSequence | None:
        """Admit the first waiting request if there is room; its cached blocks count as computed. None if not."""
        cached: list[TokenBlock] = []

        def fits(sequence: BatchedSequence) -> bool:
            cached[:] = self._cached(sequence)
            return self.pool.room_beside(cached) >= self._lacks(sequence) - len(cached)

        sequence = self.scheduler.admit(fits)
        if sequence is None:
            return None
        sequence.blocks = cached
        self.pool.claim(sequence.blocks)
        sequence.computed = len(sequence.blocks) * self._size
        if sequence.cached is None:
            sequence.cached = sequence.computed
        sequence.digest = ContextDigest(b"".join(block.held for block in sequence.blocks))
        self._allocate(sequence, self._lacks(sequence))
        known = sequence.computed - sequence.tail_first * self._size
        if known >= 0:
            self._fill(sequence, sequence.tail[known * TOKEN_BYTES :])
        sequence.tail = b""
        return sequence

    def _allocate(self, sequence: BatchedSequence, count: int) -> None:
        for _ in range(count):
            block = self.pool.allocate()
            assert block is not None, "there was room"
            sequence.blocks.append(block)

    def _compute(self, sequence: BatchedSequence, count: int) -> None:
        """Write the next `count` tokens into the request's blocks, and name full blocks."""
        self._fill(sequence, pack(sequence.context[sequence.computed : sequence.computed + count]))

    def _fill(self, sequence: BatchedSequence, tokens: bytes) -> None:
        """Write the next packed tokens into the request's blocks, and name full blocks."""
        began, end = sequence.computed, sequence.computed + len(tokens) // TOKEN_BYTES
        while sequence.computed < end:
            index = sequence.computed // self._size
            upto = min(end, (index + 1) * self._size)
            held = tokens[(sequence.computed - began) * TOKEN_BYTES : (upto - began) * TOKEN_BYTES]
            sequence.blocks[index].held += held
            sequence.digest.extend(held)
            sequence.computed = upto
            if upto % self._size == 0:
                self.pool.enter(sequence.blocks[index], self._names(sequence, index + 1)[index])

    def _names(self, sequence: BatchedSequence, count: int) -> list[int]:
        """The names of a context's first `count` blocks."""
        known = sequence.names
        if len(known) < count:
            tokens = sequence.context[len(known) * self._size : count * self._size]
            new = digests(tokens, self._size, sequence.salt, sequence.named)
            known += map(name_of, new)
            sequence.named = new[-1]
        return known[:count]
