"""The comparison finds every difference but noise in logprobs, and the proof of a tie accepts nothing else."""

from typing import Any

import pytest

from tests.differential.answers import ServerAnswer
from tests.differential.comparison import Candidates, differences, proven_tie, scored_tokens

NOISE = 1e-3


def compared(one: Any, other: Any) -> list[str]:
    return [d.path for d in differences(ServerAnswer(200, "json", one), ServerAnswer(200, "json", other), NOISE)]


@pytest.mark.parametrize(
    ("one", "other", "paths"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a"]),
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": 0}, {"a": False}, ["a"]),
        ({"a": None}, {}, ["a"]),
        ({}, {"a": None}, ["a"]),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, ["a[].b"]),
        ({"a": [1]}, {"a": [1, 2]}, ["a"]),
        ({"a": {"b": 1}}, {"a": [1]}, ["a"]),
        ("a", "b", [""]),
    ],
    ids=str,
)
def test_differences_of_values(one: Any, other: Any, paths: list[str]) -> None:
    assert compared(one, other) == paths


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ([1, 2, 3], [1, 7], "3 items != 2 items, from 1 on: [2] != [7]"),
        ([1, 2, 3], [1, 2], "3 items != 2 items, from 2 on: [3] != []"),
    ],
    ids=str,
)
def test_lists_of_other_lengths_name_where_they_part(one: list[int], other: list[int], text: str) -> None:
    (difference,) = differences(ServerAnswer(200, "json", one), ServerAnswer(200, "json", other), NOISE)
    assert difference.text == text


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ("x" * 900 + "ab", "x" * 900 + "cb", f"from character 900 on: '{'x' * 40}ab' != '{'x' * 40}cb'"),
        ("ab", "abc", "from character 2 on: 'ab' != 'abc'"),
    ],
    ids=["late", "one goes on"],
)
def test_texts_name_where_they_part(one: str, other: str, text: str) -> None:
    (difference,) = differences(ServerAnswer(200, "json", one), ServerAnswer(200, "json", other), NOISE)
    assert difference.text == text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ServerAnswer(200, "json", {}), ServerAnswer(400, "json", {})),
        (ServerAnswer(200, "json", {}), ServerAnswer(200, "text", {})),
        (ServerAnswer(200, "json", {}, True), ServerAnswer(200, "json", {}, False)),
        (ServerAnswer(200, "json", {}), ServerAnswer(200, "json", {}, broken=True)),
    ],
    ids=["status", "media type", "end", "broken"],
)
def test_differences_of_heads(one: ServerAnswer, other: ServerAnswer) -> None:
    assert len(differences(one, other, NOISE)) == 1 and not differences(one, one, NOISE)


@pytest.mark.parametrize("name", ["logprob", "token_logprobs"])
def test_logprobs_have_a_tolerance(name: str) -> None:
    assert not compared({name: [None, -1.0]}, {name: [None, -1.0009]})
    assert compared({name: [None, -1.0]}, {name: [None, -1.0011]}) == [f"{name}[]"]
    assert compared({name: [-1.0]}, {name: [None]}) == [f"{name}[]"]


def test_other_numbers_have_none() -> None:
    assert compared({"temperature": 1.0}, {"temperature": 1.0001}) == ["temperature"]


def of_completion(**scores: float) -> Any:
    return {"logprobs": {"top_logprobs": [None, scores]}}


def of_chat(**scores: float) -> Any:
    return {"top_logprobs": [{"token": token, "logprob": score, "bytes": [1]} for token, score in scores.items()]}


def of_prompt(**scores: float) -> Any:
    return {
        "prompt_logprobs": [None, {t: {"logprob": s, "rank": i, "text": t} for i, (t, s) in enumerate(scores.items())}]
    }


@pytest.mark.parametrize("made", [of_completion, of_chat, of_prompt])
@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"a": -1.0, "b": -2.0}, {"b": -2.0, "a": -1.0}, True),
        ({"a": -1.0, "b": -2.0}, {"a": -1.0, "c": -2.0005}, True),
        ({"a": -1.0, "b": -2.0}, {"a": -1.0, "c": -2.01}, False),
        ({"a": -1.0, "b": -2.0}, {"a": -1.0}, False),
        ({"a": -1.0, "b": -2.0, "c": -3.0}, {"a": -1.0, "d": -2.0, "e": -3.0}, False),
        ({"a": -1.0, "b": -2.0, "c": -3.0}, {"a": -1.0, "d": -2.0, "c": -3.0}, False),
        ({"a": -1.0, "b": -9999.0, "c": -9999.0}, {"a": -1.0, "d": -9999.0, "e": -9999.0}, True),
        ({"a": -1.0, "b": -1.2}, {"a": -1.2, "b": -1.0}, False),
    ],
    ids=str,
)
def test_candidates(made: Any, one: dict[str, float], other: dict[str, float], equal: bool) -> None:
    assert (compared(made(**one), made(**other)) == []) is equal


def test_what_else_an_entry_says_is_compared() -> None:
    one, other = of_chat(a=-1.0), of_chat(a=-1.0)
    other["top_logprobs"][0]["bytes"] = [2]
    assert compared(one, other) == ["top_logprobs"]


TOKENS = [
    Candidates("a", -0.1, {"a": -0.1, "b": -3.0}),
    Candidates("b", -0.7, {"b": -0.7, "c": -0.7004, "d": -2.0}),
    Candidates("e", -0.1, {"e": -0.1}),
]


@pytest.mark.parametrize(
    ("text", "tie"),
    [("acx", True), ("adx", False), ("bx", False), ("abe", False), ("abx", False), ("a", False), ("axx", False)],
)
def test_a_tie_is_proven_by_its_candidates(text: str, tie: bool) -> None:
    assert proven_tie(text, TOKENS, NOISE) is tie


def test_the_scored_tokens_of_both_endpoints() -> None:
    completion = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
    entry = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}
    want = [Candidates("a", -1.0, {"a": -1.0})]
    assert scored_tokens({"choices": [{"logprobs": completion}]}) == want
    assert scored_tokens({"choices": [{"logprobs": {"content": [entry]}}]}) == want
    assert scored_tokens({"choices": [{"logprobs": None}]}) == []
