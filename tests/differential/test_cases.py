"""The corpus: the same for a seed, with every trait, and each case a valid value."""

import json
from collections import Counter
from itertools import pairwise

import pytest

from tests.differential.bodies import _OUTPUTS, _TRAITS, BATCH, COUNT_TOKENS, DETOKENIZE, MODELS, TOKENIZE
from tests.differential.cases import Course, corpus
from tests.differential.forced import CALLS, FORCED, REASONING, part_of
from tests.differential.odd import ODD

CORPUS = corpus(1, 150)


def test_a_seed_gives_the_same_corpus_again() -> None:
    assert corpus(1, 150) == CORPUS != corpus(2, 150)


def test_a_case_depends_on_its_number_only() -> None:
    drawn = 150 - len(FORCED)
    assert corpus(1, 400)[:drawn] == CORPUS[:drawn]


def test_the_corpus_has_its_size_and_all_odd_requests() -> None:
    assert len(CORPUS) == 150 + len(ODD)
    assert [case.number for case in CORPUS] == list(range(len(CORPUS)))
    assert {case.name for case in CORPUS if case.course is Course.ODD} == ODD.keys()


def test_a_corpus_without_room_for_the_forced_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        corpus(1, len(FORCED) - 1)


def test_bodies_are_json() -> None:
    for case in CORPUS:
        assert json.loads(json.dumps(case.body)) == case.body


def test_every_endpoint_is_asked_whole_and_as_a_stream() -> None:
    generating = {case.path for case in CORPUS if case.course is Course.STEPS} - {BATCH}
    assert len(generating) == 4 and any(case.path == BATCH and case.choices > 1 for case in CORPUS)
    for path in generating:
        assert {case.streamed for case in CORPUS if case.path == path and case.course is Course.STEPS} == {False, True}
    assert {case.path for case in CORPUS if case.course is Course.FRONTEND} == {
        TOKENIZE,
        DETOKENIZE,
        COUNT_TOKENS,
        MODELS,
    }


def test_every_trait_has_its_turn() -> None:
    seen = Counter((case.path, trait) for case in CORPUS for trait in case.name.split(", "))
    for path in _TRAITS:
        for trait in (*_TRAITS[path], *_OUTPUTS[path]):
            assert seen[path, trait.__name__.strip("_")], f"{path} {trait.__name__}"


def test_what_is_drawn_has_one_right_answer() -> None:
    for case in CORPUS:
        if case.course in (Course.STEPS, Course.ROUNDS):
            assert case.greedy or "seed" in case.asked, case


def test_successive_cases_differ() -> None:
    assert all(one.body != other.body for one, other in pairwise(CORPUS) if one.path != MODELS)


@pytest.mark.parametrize(
    ("body", "choices"),
    [({"prompt": "a"}, 1), ({"prompt": [5, 6], "n": 2}, 2), ({"prompt": ["a", "b"], "n": 3}, 6), ({}, 1)],
    ids=str,
)
def test_the_number_of_choices(body: dict[str, object], choices: int) -> None:
    case = next(case for case in CORPUS if case.course is Course.STEPS)
    assert type(case)(0, "", case.path, body, Course.STEPS).choices == choices


def test_the_number_of_chats_of_a_batch() -> None:
    case = next(case for case in CORPUS if case.path == BATCH)
    assert case.choices == len(case.asked["messages"])


@pytest.mark.parametrize(
    ("document", "part", "text"),
    [
        ({"choices": [{"message": {"reasoning": "so", "content": "much"}}]}, REASONING, "so"),
        ({"choices": [{"message": {"reasoning": None, "content": "much"}}]}, REASONING, ""),
        ({"content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "much"}]}, REASONING, "so"),
        ({"output": [{"content": [{"type": "reasoning_text", "text": "so"}]}]}, REASONING, "so"),
        ({"output": [{"content": [{"type": "output_text", "text": "much"}]}]}, REASONING, ""),
        ({"reasoning": {"effort": "low"}}, REASONING, ""),
        ({"choices": [{"message": {"tool_calls": [{"function": {"arguments": '{"a": 1}'}}]}}]}, CALLS, '{"a": 1}'),
        ({"choices": [{"message": {"tool_calls": [], "content": "much"}}]}, CALLS, ""),
        ({"content": [{"type": "tool_use", "input": {"a": 1}}]}, CALLS, '{"a": 1}'),
        ({"content": [{"type": "tool_use", "input": {}}]}, CALLS, ""),
        ([{"delta": {"type": "input_json_delta", "partial_json": "{"}}], CALLS, "{"),
    ],
    ids=str,
)
def test_the_forced_part_of_an_answer(document: object, part: str, text: str) -> None:
    assert part_of(document, part) == text
