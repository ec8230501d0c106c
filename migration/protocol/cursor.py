"""One stream's place: which hop owns it, which token comes next.

The cursor is where ownership is decided. A replica may compute what it likes; a token reaches the client
only if it carries the current hop and the next index. The hop changes with the host's `Moved`, or when
the reader itself resubmits the request. So a lost confirmation can cost work, never a token or a duplicate.

    hop < current    a replica that no longer owns the request: dropped
    hop = current    index < next: the overlap is dropped; index > next: GapError
    hop > current    the new host is ahead of the old one's last event: kept until `Moved`
"""

from contextlib import suppress
from dataclasses import dataclass, field

from migration.protocol.errors import MigrationError
from migration.protocol.request import Delta, Moved


class GapError(MigrationError):
    """Tokens between the cursor and a delta of the current hop are missing."""


@dataclass(slots=True)
class Cursor:
    """Reassembles one request's output from the deltas of every replica it lived on.

    `extras` are those that the reader has not taken yet.
    """

    hop: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    extras: list[tuple[int, bytes]] = field(default_factory=list)
    _early: list[Delta] = field(default_factory=list)

    @property
    def next_index(self) -> int:
        """Index of the next output token."""
        return len(self.tokens)

    def feed(self, delta: Delta) -> tuple[int, ...]:
        """Take a delta; return the tokens that it adds.

        Raises:
            GapError: tokens are missing before it. The cursor is unchanged.
        """
        if self.finish is not None or delta.hop < self.hop:
            return ()
        if delta.hop > self.hop:
            self._early.append(delta)
            return ()
        if delta.index > self.next_index:
            raise GapError(f"token {self.next_index} is missing before {delta.index} (hop {delta.hop})")
        index = self.next_index
        fresh = delta.tokens[index - delta.index :]
        self.tokens.extend(fresh)
        if delta.extras:
            self.extras.extend(extra for extra in delta.extras if extra[0] >= index)
        self.finish = delta.finish
        return fresh

    def moved(self, moved: Moved) -> tuple[int, ...]:
        """The host handed over: follow the new hop, and return the tokens that had come early.

        Raises:
            GapError: the old host's last tokens are missing. The cursor is unchanged.
        """
        if self.finish is not None or moved.hop != self.hop:
            return ()
        if moved.index > self.next_index:
            raise GapError(f"token {self.next_index} is missing before hop {moved.next_hop}")
        return self.advance(moved.next_hop)

    def advance(self, hop: int) -> tuple[int, ...]:
        """Make `hop` the owner (it resumes at `next_index`); return the tokens that had come early.

        Early tokens after a gap are dropped: whoever advances then asks the owner for all from `next_index` on.
        """
        if hop <= self.hop:
            raise ValueError(f"hop must rise: {hop} after {self.hop}")
        self.hop = hop
        early, self._early = self._early, []
        before = self.next_index
        with suppress(GapError):
            for delta in early:
                self.feed(delta)
        return tuple(self.tokens[before:])
