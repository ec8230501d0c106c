"""Which KV blocks to copy next, and when to stop copying and freeze (live migration's pre-copy).

KV is append-only, so full blocks can be copied while the request decodes. Each round copies the blocks that
filled during the one before; once the remainder is small, or does not shrink, copying on gains nothing.
"""

from dataclasses import dataclass

from policies.model import Blocks


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """When to stop pre-copying."""

    max_rounds: int = 4
    final_blocks: int = 1
    """Freeze once at most this many full blocks are not copied; fewer blocks than this are not worth a
    transfer inside the pause either: the target recomputes them in its first step."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The blocks copied so far; `last_round` is the number of blocks in the newest round."""

    copied: Blocks = Blocks(0)
    rounds: int = 0
    last_round: Blocks = Blocks(0)

    def add(self, upto: Blocks) -> "Progress":
        """The progress after a round that copied the blocks up to `upto`."""
        return Progress(upto, self.rounds + 1, Blocks(upto - self.copied))


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


def final_range(progress: Progress, full: Blocks, limits: CopyLimits) -> tuple[Blocks, Blocks] | None:
    """The blocks to copy inside the pause, None when recomputing them is the cheaper choice."""
    if full - progress.copied <= limits.final_blocks:
        return None
    return progress.copied, full
