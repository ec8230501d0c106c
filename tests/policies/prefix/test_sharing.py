"""Marginal sizes: their laws, on random prompts that begin alike."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.model import ReplicaId
from policies.prefix.sharing import ActivePrompt, ActivePrompts
from tests.policies.settings import unhurried

BLOCK = 4
A, B = ReplicaId("a"), ReplicaId("b")

branches = st.lists(st.integers(0, 2), max_size=5)
"""A prompt as the branches that it takes, one per block."""
prompts = st.lists(st.tuples(branches, st.integers(0, 9)), min_size=1, max_size=12)
"""Prompts, and the tokens that follow their blocks."""


def names(path: Sequence[int]) -> tuple[int, ...]:
    """Equal names stand for equal beginnings."""
    return tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))


def size(path: Sequence[int], rest: int) -> int:
    return max(1, BLOCK * len(path) + rest)


def distinct(requests: Sequence[tuple[Sequence[int], int]]) -> int:
    """The distinct tokens, by sets: all tokens, less those of blocks that several requests may share."""
    usable = [names(path)[: (size(path, rest) - 1) // BLOCK] for path, rest in requests]
    total = sum(size(path, rest) for path, rest in requests)
    return total - BLOCK * (sum(map(len, usable)) - len(frozenset().union(*usable)))


class Requests:
    """Requests on replicas, with their sizes when they came."""

    def __init__(self, wanted: Sequence[tuple[Sequence[int], int]]) -> None:
        self.tree = ActivePrompts(BLOCK)
        self.tokens = [size(path, rest) for path, rest in wanted]
        self.prompts: list[ActivePrompt | None] = []
        for (path, _), tokens in zip(wanted, self.tokens, strict=True):
            self.prompts.append(self.tree.begin(names(path), tokens))
            self.tree.check_integrity()

    def enter(self, number: int, replica: ReplicaId = A) -> int:
        prompt = self.prompts[number]
        return self.tokens[number] - (self.tree.enter(prompt, replica) if prompt is not None else 0)

    def leave(self, number: int, replica: ReplicaId = A) -> int:
        prompt = self.prompts[number]
        return self.tokens[number] - (self.tree.leave(prompt, replica) if prompt is not None else 0)

    def size(self, number: int, replica: ReplicaId = A, own: int = 0) -> int:
        prompt = self.prompts[number]
        return self.tokens[number] - (BLOCK * prompt.shared(replica, own) if prompt is not None else 0)


@unhurried
@given(prompts, st.randoms(use_true_random=False))
def test_in_any_order_sizes_add_up_to_the_distinct_tokens(wanted: list[tuple[list[int], int]], chance: Random) -> None:
    order = list(range(len(wanted)))
    for _ in range(2):
        chance.shuffle(order)
        requests = Requests(wanted)
        assert sum(requests.enter(number) for number in order) == distinct(wanted)
        assert sum(requests.tokens) - requests.tree.saved(A) == distinct(wanted)
        together = zip(requests.tokens, requests.prompts, strict=True)
        assert requests.tree.distinct(together) == distinct(wanted)


@unhurried
@given(prompts, st.data())
def test_leaving_frees_what_coming_again_would_take(wanted: list[tuple[list[int], int]], data: st.DataObject) -> None:
    requests = Requests(wanted)
    for number in range(len(wanted)):
        requests.enter(number)
    number = data.draw(st.sampled_from(range(len(wanted))))
    would_free = requests.size(number, own=1)
    freed = requests.leave(number)
    assert freed == would_free == requests.size(number)
    assert freed == distinct(wanted) - distinct([each for i, each in enumerate(wanted) if i != number])
    assert requests.enter(number) == freed


@unhurried
@given(prompts, st.randoms(use_true_random=False))
def test_requests_come_and_go_on_two_replicas(wanted: list[tuple[list[int], int]], chance: Random) -> None:
    """The tree has what runs, whatever came and went before, and is empty at the end."""
    requests, there = Requests(wanted), {A: set[int](), B: set[int]()}
    left = set(range(len(wanted)))
    for _ in range(30):
        number, replica = chance.choice(sorted(left)), chance.choice([A, B])
        if number in there[replica]:
            there[replica].remove(number)
            requests.leave(number, replica)
        elif chance.random() < 0.7:
            there[replica].add(number)
            requests.enter(number, replica)
        elif len(left) > 1 and not any(number in each for each in there.values()):
            left.remove(number)
            if (prompt := requests.prompts[number]) is not None:
                requests.tree.end(prompt)
        requests.tree.check_integrity()
        for name, numbers in there.items():
            tokens = sum(requests.tokens[each] for each in numbers)
            assert tokens - requests.tree.saved(name) == distinct([wanted[each] for each in numbers])
    for number in left:
        for replica in A, B:
            if number in there[replica]:
                requests.leave(number, replica)
        if (prompt := requests.prompts[number]) is not None:
            requests.tree.end(prompt)
    assert ActivePrompts(BLOCK).find((1,), 9) is not None and requests.tree.saved(A) == requests.tree.saved(B) == 0
    probe = requests.tree.begin((1,), 9)
    assert probe is not None and not probe.is_shared
    requests.tree.check_integrity()


@unhurried
@given(prompts, branches, st.integers(0, 9))
def test_a_query_finds_what_a_request_would_share(
    wanted: list[tuple[list[int], int]], path: list[int], rest: int
) -> None:
    requests = Requests(wanted)
    for number in range(len(wanted)):
        requests.enter(number, (A, B)[number % 2])
    asked = requests.tree.find(names(path), size(path, rest))
    shared = [0, 0] if asked is None else [asked.shared(A), asked.shared(B)]
    requests.tree.check_integrity()
    begun = requests.tree.begin(names(path), size(path, rest))
    assert (begun is None) == (asked is None)
    assert begun is None or [begun.shared(A), begun.shared(B)] == shared
    here = wanted[::2]
    assert size(path, rest) - BLOCK * shared[0] == distinct([*here, (path, rest)]) - distinct(here)


@pytest.mark.parametrize(("tokens", "shared"), [(8, 4), (9, 8), (100, 8)])
def test_the_block_of_the_last_token_is_never_shared(tokens: int, shared: int) -> None:
    tree = ActivePrompts(BLOCK)
    first, second = (tree.begin((1, 2), each) for each in (100, tokens))
    assert first is not None and second is not None
    tree.enter(first, A)
    assert tree.enter(second, A) == shared


def test_a_long_prompt_of_its_own_is_one_node() -> None:
    tree = ActivePrompts(BLOCK)
    prompt = tree.begin(range(1000), 5000)
    assert prompt is not None and len(list(prompt.upwards())) == 1
    branch = tree.begin([*range(600), -1], 5000)
    assert branch is not None and [node.blocks for node in branch.upwards()] == [601, 600]
    tree.end(branch)
    assert [node.blocks for node in prompt.upwards()] == [1000] and prompt.names == tuple(range(1000))
