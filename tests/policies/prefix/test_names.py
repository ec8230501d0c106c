"""Names of blocks, without vLLM. `tests.deployments.engine.test_naming` compares them with vLLM's."""

from hypothesis import given
from hypothesis import strategies as st

from policies.prefix.names import default_naming, digests, name_of

tokens = st.lists(st.integers(0, 200_000), max_size=100)


def test_names_are_those_of_vllm() -> None:
    assert digests(range(64), 16)[3].hex().startswith("1cbbd587078480d8")
    assert default_naming(16).mark == 3262291359910021016


@given(tokens, st.integers(1, 40))
def test_every_full_block_has_a_name(prompt: list[int], size: int) -> None:
    assert len(digests(prompt, size)) == len(prompt) // size


@given(tokens, st.integers(1, 20), st.integers(0, 100), st.sampled_from([None, "", "one", "other"]))
def test_digests_of_a_prompt_in_two_parts_are_the_same(prompt: list[int], size: int, at: int, salt: str | None) -> None:
    whole = digests(prompt, size, salt)
    cut = min(at, len(whole))
    first = digests(prompt[: cut * size], size, salt)
    rest = digests(prompt[cut * size :], size, salt, first[-1] if first else None)
    assert first + rest == whole


def test_a_name_stands_for_all_tokens_before_and_the_salt() -> None:
    one, other = digests([1, 2, 3, 4], 2), digests([9, 2, 3, 4], 2)
    assert one[1] != other[1]
    assert digests([1, 2, 3, 4], 2, "salt")[1] != one[1]
    assert digests([1, 2, 3, 4], 2, "") == one
    assert name_of(one[0]) == int(one[0].hex()[-16:], 16)
