"""Text that comes in steps: the same as decoding all at once, and ended by stop strings however they fall."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from app.ingress.openai.answers.text import TextStream
from app.tinymodel import VOCAB_SIZE

PROMPT = (40, 41, 42)
calm = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ids = st.integers(0, VOCAB_SIZE - 1)


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text).ids)


def feed(
    tokenizer: Tokenizer, steps: list[tuple[int, ...]], stops: tuple[str, ...] = (), min_tokens: int = 0
) -> tuple[str, bool]:
    """The whole text of an answer that comes in these steps, and whether a stop string ended it."""
    stream = TextStream(tokenizer, PROMPT, stops, min_tokens)
    text = ""
    for step in steps:
        piece = stream.feed(step)
        text += piece.text
        if piece.stopped:
            return text, True
    return text + stream.flush(), False


def singly(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(token,) for token in tokens]


def split(tokens: tuple[int, ...], cuts: list[int]) -> list[tuple[int, ...]]:
    """The tokens in steps that end at the cuts."""
    bounds = sorted({0, len(tokens), *(c for c in cuts if c < len(tokens))})
    return [tokens[a:b] for a, b in pairwise(bounds)]


def decoded(tokenizer: Tokenizer, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> str:
    """All at once, without a character that is incomplete at the end."""
    before = tokenizer.decode(list(prompt))
    return str(tokenizer.decode(list(prompt + tokens)))[len(before) :].rstrip("\ufffd")


# --- decoding -----------------------------------------------------------------------------------------


@calm
@given(tokens=st.lists(ids, max_size=40).map(tuple), cuts=st.lists(st.integers(1, 40)))
def test_steps_say_what_decoding_all_at_once_says(
    tokenizer: Tokenizer, tokens: tuple[int, ...], cuts: list[int]
) -> None:
    text, stopped = feed(tokenizer, split(tokens, cuts))
    assert (text.rstrip("\ufffd"), stopped) == (decoded(tokenizer, PROMPT, tokens), False)


@calm
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(1, 60)))
@example(text="\U0001f600\u00e9\u6f22\u5b57\u0000\u200d", cuts=[])
def test_no_character_is_lost_or_said_in_parts(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    tokens = ids_of(tokenizer, text)
    assert feed(tokenizer, split(tokens, cuts))[0] == text


def test_a_character_is_said_with_its_last_byte(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, PROMPT, ())
    tokens = ids_of(tokenizer, "\U0001f600")
    assert [stream.feed((t,)).text for t in tokens] == [""] * (len(tokens) - 1) + ["\U0001f600"]
    assert len(tokens) > 2


@calm
@given(prompt=st.lists(ids, min_size=1, max_size=12).map(tuple), tokens=st.lists(ids, max_size=12).map(tuple))
def test_no_prompt_breaks_the_decoding(tokenizer: Tokenizer, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    stream = TextStream(tokenizer, prompt, ())
    assert isinstance("".join(stream.feed((t,)).text for t in tokens), str)


@pytest.mark.parametrize("length", [0, 1, 5, 40])
def test_nothing_of_a_prompt_that_ends_inside_a_character_is_said(tokenizer: Tokenizer, length: int) -> None:
    """Such prompts come as token ids, and from clients that cut texts by bytes."""
    half = ids_of(tokenizer, "ü")[:1]
    prompt = (*ids_of(tokenizer, "Blocks move " * length)[:length], *half)
    answer = ids_of(tokenizer, "replicas keep")
    stream = TextStream(tokenizer, prompt, ())
    said = "".join(stream.feed((token,)).text for token in answer) + stream.flush()
    assert "Block" not in said
    assert said.endswith("replicas keep")


def test_special_tokens_are_not_said(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("</s>")
    assert end is not None
    assert feed(tokenizer, singly((*ids_of(tokenizer, "the end"), end)))[0] == "the end"


def test_a_step_without_tokens_says_nothing(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, [(), (), ()]) == ("", False)


# --- stop strings -------------------------------------------------------------------------------------

HOWEVER = {"one by one": 1, "two by two": 2, "three by three": 3, "all at once": 100}


@pytest.mark.parametrize("size", HOWEVER.values(), ids=HOWEVER)
@pytest.mark.parametrize(
    ("text", "stops", "said"),
    [
        ("abcdef", ("cd",), "ab"),
        ("abcdef", ("ef",), "abcd"),
        ("abcdef", ("a",), ""),
        ("abcdef", ("abcdef",), ""),
        ("abcabd", ("abd",), "abc"),
        ("aaaab", ("aab",), "aa"),
        ("abcdef", ("ef", "bc"), "a"),
        ("abcdef", ("zzz", "d"), "abc"),
        ("abcdef", ("abcdef", "c"), "ab"),
        ("abcdef", ("bcd", "cd"), "a"),
        ("abcdef", ("cd", "bcd"), "ab"),
        ("one\n\ntwo", ("\n\n",), "one"),
        ("caf\u00e9 \U0001f600!", ("\U0001f600",), "caf\u00e9 "),
        ("say </s> now", ("</s>",), "say "),
    ],
)
def test_the_stop_string_that_is_complete_first_ends_the_answer(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], said: str, size: int
) -> None:
    tokens = ids_of_letters(tokenizer, text)
    steps = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    assert feed(tokenizer, steps, stops) == (said, True)


def ids_of_letters(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Letter by letter, so that a special token's name is text."""
    return tuple(t for letter in text for t in ids_of(tokenizer, letter))


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("abcdef", ("efg",)),
        ("abcdef", ("def!", "f?")),
        ("aaaa", ("aaaaa",)),
        ("abab", ("abc",)),
        ("abc", ("abcd" * 100,)),
        ("\U0001f600", ("\U0001f600!",)),
    ],
)
def test_what_only_begins_a_stop_string_is_said_in_the_end(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...]
) -> None:
    assert feed(tokenizer, singly(ids_of_letters(tokenizer, text)), stops) == (text, False)


def test_text_is_held_back_no_longer_than_needed(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, PROMPT, ("abX",))
    pieces = [stream.feed((token,)).text for token in ids_of_letters(tokenizer, "zabaab")]
    assert pieces == ["z", "", "", "ab", "a", ""] and stream.flush() == "ab" and stream.flush() == ""


@pytest.mark.parametrize("size", HOWEVER.values(), ids=HOWEVER)
@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "said"),
    [
        ("abcabc", ("b",), 0, "a"),
        ("abcabc", ("b",), 1, "a"),
        ("abcabc", ("b",), 2, "abca"),
        ("abcabc", ("b",), 5, None),
        ("abcabc", ("bc",), 2, "a"),
        ("abcabc", ("bc",), 3, "abca"),
        ("abcabc", ("abcab", "ab"), 2, ""),
        ("abcabc", ("ab", "abcab"), 2, "abc"),
        ("abcdef", ("ab", "abX", "e"), 2, "abcd"),
        ("aaaaaa", ("aa",), 3, "aa"),
        ("aaaaaa", ("aa",), 6, None),
        ("abcabc", ("c",), 900, None),
    ],
)
def test_a_stop_string_that_is_complete_too_early_ends_nothing(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], min_tokens: int, said: str | None, size: int
) -> None:
    """One that only begins early does end the answer, as in vLLM."""
    tokens = ids_of_letters(tokenizer, text)
    steps = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    expected = (text, False) if said is None else (said, True)
    assert feed(tokenizer, steps, stops, min_tokens) == expected


letters = st.text("ab", max_size=12)
some_stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4).map(tuple)


@calm
@given(text=letters, stops=some_stops, cuts=st.lists(st.integers(1, 12)), min_tokens=st.integers(0, 8))
def test_the_answer_is_the_same_however_its_tokens_come(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], cuts: list[int], min_tokens: int
) -> None:
    tokens = ids_of_letters(tokenizer, text)
    said = feed(tokenizer, split(tokens, cuts), stops, min_tokens)
    assert said == feed(tokenizer, singly(tokens), stops, min_tokens)
    ends = [
        (end, end - len(stop))
        for stop in stops
        for end in range(max(min_tokens + 1, len(stop)), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    assert said == ((text[: min(ends, key=lambda end: end[0])[1]], True) if ends else (text, False))
