"""Pre-copy: which blocks are full, when to go on copying, and that nothing is copied twice or left out."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from migration.protocol.rounds import (
    CopyLimits,
    Progress,
    filled_range,
    final_range,
    full_blocks,
    tail_blocks,
    unfilled,
    worth_another_round,
)
from policies.model import Blocks

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

limits = st.builds(CopyLimits, max_rounds=st.integers(0, 6), final_blocks=st.integers(0, 8))


@pytest.mark.parametrize(
    ("tokens", "full"),
    [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)],
    ids=[
        "an empty context has no full block",
        "one token has none computed",
        "the newest token of a block is not computed yet",
        "one token more completes a block",
        "the second block waits for its last token",
        "and is complete after it",
    ],
)
def test_full_blocks_at_the_boundary(tokens: int, full: int) -> None:
    assert full_blocks(tokens, 16) == full


@unhurried
@given(tokens=st.integers(0, 10_000), size=st.integers(1, 64))
def test_full_blocks_hold_computed_tokens_only_and_all_that_fill_a_block(tokens: int, size: int) -> None:
    computed = max(0, tokens - 1)
    assert full_blocks(tokens, size) * size <= computed < (full_blocks(tokens, size) + 1) * size


def copy(limits: CopyLimits, start: int, grown: list[int]) -> list[tuple[int, int]]:
    """The ranges that are copied while the request grows by `grown[i]` blocks during round i, the final one last."""
    progress, full, ranges = Progress(), start, list[tuple[int, int]]()
    while worth_another_round(progress, Blocks(full), limits):
        ranges.append((progress.copied, full))
        progress = progress.add(Blocks(full))
        full += grown[progress.rounds - 1] if progress.rounds <= len(grown) else 1_000
    final = final_range(progress, Blocks(full), limits)
    assert full - (final[1] if final else progress.copied) <= limits.final_blocks
    return [*ranges, final] if final else ranges


@unhurried
@given(limits, st.integers(0, 1_000), st.lists(st.integers(0, 100), max_size=8))
def test_ranges_follow_each_other_from_the_first_block(limits: CopyLimits, start: int, grown: list[int]) -> None:
    ranges = copy(limits, start, grown)
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges)][: len(ranges)]
    assert all(low < high for low, high in ranges)


@unhurried
@given(limits, st.integers(0, 1_000), st.lists(st.integers(0, 100), max_size=8))
def test_copying_ends_however_fast_the_request_grows(limits: CopyLimits, start: int, grown: list[int]) -> None:
    assert len(copy(limits, start, grown)) <= limits.max_rounds + 1


def test_each_round_is_smaller_than_the_one_before() -> None:
    assert copy(CopyLimits(max_rounds=9, final_blocks=1), 64, [16, 4, 4, 4]) == [(0, 64), (64, 80), (80, 84), (84, 88)]


def test_few_blocks_are_not_worth_a_transfer_in_the_pause() -> None:
    progress = Progress(Blocks(10), rounds=1, last_round=Blocks(10))
    assert final_range(progress, Blocks(11), CopyLimits(final_blocks=1)) is None
    assert final_range(progress, Blocks(12), CopyLimits(final_blocks=1)) == (10, 12)


@pytest.mark.parametrize(
    ("tokens", "most", "blocks"),
    [(43, 8, 1), (41, 8, 0), (42, 8, 1), (45, 8, 1), (48, 8, 2), (49, 8, 0), (48, 1, 0)],
    ids=[
        "a block that is not full",
        "nothing behind the copied blocks",
        "one token",
        "a full block",
        "a full block and another one",
        "two full blocks are copied inside the pause",
        "more than a slot",
    ],
)
def test_tail(tokens: int, most: int, blocks: int) -> None:
    progress = Progress(Blocks(10), 1, Blocks(10))
    assert tail_blocks(progress, tokens, 4, CopyLimits(final_blocks=1), Blocks(most)) == blocks


def test_nothing_is_copied_inside_the_pause_after_the_tail() -> None:
    progress = Progress(Blocks(10), 1, Blocks(10)).add_tail(Blocks(2))
    assert final_range(progress, Blocks(13), CopyLimits(final_blocks=1)) is None and progress.sent == 12


def test_without_rounds_everything_is_copied_in_the_pause() -> None:
    assert copy(CopyLimits(max_rounds=0, final_blocks=0), 40, []) == [(0, 40)]


def test_progress_counts_rounds_and_blocks() -> None:
    assert Progress().add(Blocks(8)).add(Blocks(11)) == Progress(Blocks(11), rounds=2, last_round=Blocks(3))


# --- of a prefill -------------------------------------------------------------------------------------


@unhurried
@given(
    prompt=st.integers(1, 200),
    size=st.integers(1, 16),
    present=st.integers(0, 30),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_every_block_of_a_prefill_is_copied_once_and_only_when_it_is_computed(
    prompt: int, size: int, present: int, steps: list[int]
) -> None:
    full = full_blocks(prompt, size)
    progress, computed, ranges = Progress.beginning(Blocks(min(present, full))), 0, list[tuple[int, int]]()
    for step in steps:
        computed = min(prompt, computed + step)
        beyond = unfilled(progress, prompt, size)
        found = filled_range(progress, computed, prompt, size)
        assert (found is not None) == (beyond is not None and computed > beyond), (
            "a wait ends when blocks can be copied"
        )
        if found is not None:
            assert found[0] == progress.copied < found[1] <= full and found[1] * size <= computed
            ranges.append(found)
            progress = progress.add(found[1])
    assert progress.copied == max(min(present, full), min(full, computed // size))
    assert (unfilled(progress, prompt, size) is None) == (progress.copied == full)


def test_block_of_a_prefill_without_a_token_behind_it_waits_for_the_first_output_token() -> None:
    """The target's engine computes a token behind the blocks that it loads."""
    assert filled_range(Progress(), 64, 64, 16) == (0, 3)
    assert filled_range(Progress(), 64, 65, 16) == (0, 4)
