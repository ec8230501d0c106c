"""Which KV blocks to copy next, and when to stop copying and freeze (live migration's pre-copy).

KV is append-only, so full blocks can be copied while the request decodes. Each round copies the blocks that
filled during the one before; once the remainder is small, or does not shrink, copying on gains nothing.

While the prompt is still being computed, there is no hurry, and no number of rounds is too large: each copies what the
prefill has filled by then.

A small remainder, with the block that is not full, is the tail. It is copied while the request decodes, too, so that
the target computes only the tokens that came meanwhile.
"""

from dataclasses import dataclass, replace

from policies.model import Blocks


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """When to stop pre-copying."""

    max_rounds: int = 4
    final_blocks: int = 1
    """Send the tail, and freeze, once at most this many full blocks are not copied. Fewer blocks than this are not
    worth a transfer inside the pause: the target recomputes them in its first step."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The blocks that the target has, from the first one on: `present` ones had been there, others come by rounds.

    `copied` is the number of both, `last_round` the number of blocks in the newest round, `tail` that of the tail.
    """

    copied: Blocks = Blocks(0)
    rounds: int = 0
    last_round: Blocks = Blocks(0)
    tail: Blocks = Blocks(0)
    present: Blocks = Blocks(0)

    @classmethod
    def beginning(cls, present: Blocks) -> "Progress":
        """The progress before the first round."""
        return cls(copied=present, present=present)

    def add(self, upto: Blocks) -> "Progress":
        """The progress after a round that copied the blocks up to `upto`."""
        return replace(self, copied=upto, rounds=self.rounds + 1, last_round=Blocks(upto - self.copied))

    def add_tail(self, blocks: Blocks) -> "Progress":
        """The progress after a tail of that many blocks."""
        return replace(self, tail=blocks)

    @property
    def sent(self) -> Blocks:
        """All blocks sent."""
        return Blocks(self.copied - self.present + self.tail)


def full_blocks(tokens: int, block_size: int) -> Blocks:
    """Blocks whose KV is complete when `tokens` tokens are known.

    The newest token's own KV is computed only by the step that follows, hence the minus one.
    """
    return Blocks(max(0, (tokens - 1) // block_size))


def worth_another_round(progress: Progress, full: Blocks, limits: CopyLimits) -> bool:
    """True if it pays to copy blocks [progress.copied, full) while the request keeps decoding."""
    remaining = full - progress.copied
    if remaining <= limits.final_blocks or progress.rounds >= limits.max_rounds:
        return False
    return progress.rounds == 0 or remaining < progress.last_round


def filled_range(progress: Progress, computed: int, tokens: int, block_size: int) -> tuple[Blocks, Blocks] | None:
    """The blocks that a prefill has filled and that are not copied, None without any.

    `computed` of the context's `tokens` known tokens are computed. A block is copied only if a known token stands
    behind it, as in any other round.
    """
    last = min(Blocks(computed // block_size), full_blocks(tokens, block_size))
    return (progress.copied, last) if last > progress.copied else None


def unfilled(progress: Progress, tokens: int, block_size: int) -> int | None:
    """The number of tokens beyond which a prefill has filled a block that is not copied; None if none is left."""
    return None if full_blocks(tokens, block_size) <= progress.copied else (progress.copied + 1) * block_size - 1


def final_range(progress: Progress, full: Blocks, limits: CopyLimits) -> tuple[Blocks, Blocks] | None:
    """The blocks to copy inside the pause, None when recomputing them is the cheaper choice."""
    if progress.tail or full - progress.copied <= limits.final_blocks:
        return None
    return progress.copied, full


def tail_blocks(progress: Progress, tokens: int, block_size: int, limits: CopyLimits, most: Blocks) -> Blocks:
    """The number of blocks of the tail when `tokens` tokens are known.

    0 if none is left, they are more than `most`, or blocks have to be copied inside the pause anyway.
    """
    blocks = Blocks(-(-max(0, tokens - 1) // block_size) - progress.copied)
    few = full_blocks(tokens, block_size) - progress.copied <= limits.final_blocks
    return blocks if few and 0 < blocks <= most else Blocks(0)
