"""Changes of caches, one after another."""

from hypothesis import given
from hypothesis import strategies as st

from policies.prefix.change import CacheChange, Tier

Contents = dict[Tier, frozenset[int]]

contents = st.fixed_dictionaries({tier: st.frozensets(st.integers(0, 5)) for tier in Tier})


def between(before: Contents, after: Contents, whole: bool) -> CacheChange:
    """The change from one content to the next."""
    if whole:
        return CacheChange({tier: tuple(names) for tier, names in after.items() if names}, {}, True)
    stored = {tier: tuple(after[tier] - before[tier]) for tier in Tier}
    return CacheChange(stored, {tier: tuple(before[tier] - after[tier]) for tier in Tier}, False)


def applied(change: CacheChange, before: Contents) -> Contents:
    """The content after a change."""
    kept = {tier: frozenset() if change.whole else before[tier] for tier in Tier}
    return {t: kept[t] - frozenset(change.removed.get(t, ())) | frozenset(change.stored.get(t, ())) for t in Tier}


@given(contents, st.lists(st.tuples(contents, st.booleans()), min_size=1, max_size=6))
def test_several_changes_are_one(before: Contents, steps: list[tuple[Contents, bool]]) -> None:
    now, together = before, None
    for after, whole in steps:
        change = between(now, after, whole)
        together = change if together is None else together.then(change)
        now = after
    assert together is not None
    assert applied(together, before) == now
    assert together.whole == any(whole for _, whole in steps)
    for tier in Tier:
        stored, removed = together.stored.get(tier, ()), together.removed.get(tier, ())
        assert len({*stored, *removed}) == len(stored) + len(removed), "no name twice"
        assert together.whole or not (set(stored) & before[tier] or set(removed) - before[tier]), "net changes only"


def test_a_block_that_comes_back_is_no_change() -> None:
    gone = CacheChange({}, {Tier.HBM: (1, 2)}, False)
    back = CacheChange({Tier.HBM: (1, 3)}, {}, False)
    assert gone.then(back) == CacheChange({Tier.HBM: (3,)}, {Tier.HBM: (2,)}, False)
