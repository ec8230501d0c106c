"""Docstrings and comments are in plain English: nouns of the field instead of clauses, no verbs of speech for data."""

import re
from collections.abc import Mapping

import pytest

from tests.style.sources import modules, read, texts

OBSCURE: Mapping[str, str] = {
    "a number or an amount without its noun": r"\bso (many|much)\b",
    "a clause for a plan": r"\bwhat (is|are|was|were) to\b|\b(is|are) to be\b",
    "a verb of speech for data": r"\b(told|tells?|heard|hears?|said|says?)\b",
    "speech in the place of a message or a value": r"\b(a|its|his|last|leaves?|left|the) word\b",
    "a clause for an outcome": r"\b(came|come|comes|become|becomes|became) of (it|them|one|a|an|the|its)\b",
    "a clause at the beginning": r"^(What|Whether|Whoever|How (many|much|long|far|often|fast)|As (many|much) as)\b",
}
"""Kinds of phrases, as regular expressions."""


def obscure(text: str) -> list[str]:
    """The kinds of obscure phrases in a text."""
    return [kind for kind, phrase in OBSCURE.items() if re.search(phrase, text, re.IGNORECASE)]


@pytest.mark.parametrize("module", list(modules()))
def test_module_is_in_plain_english(module: str) -> None:
    assert [(text.line, text.text, kinds) for text in texts(read(module)) if (kinds := obscure(text.text))] == []


@pytest.mark.parametrize(
    "text",
    [
        "The replica is told of so many requests.",
        "What is to be done about it.",
        "Leaves word under a key.",
        "Moves, and what came of them.",
        "Whether the request ended.",
        "How long a step takes.",
    ],
)
def test_obscure_text_is_found(text: str) -> None:
    assert obscure(text)


@pytest.mark.parametrize(
    "text",
    ["True if the request ended.", "The number of requests.", "Times of one migration, taken at the source."],
)
def test_plain_text_is_not(text: str) -> None:
    assert obscure(text) == []


def test_docstrings_of_constants_and_comments_are_read() -> None:
    source = 'A = 1\n"""A constant\nof two lines."""\nB = "a string"  # A comment.\n'
    assert [(text.line, text.text) for text in texts(source)] == [(2, "A constant of two lines."), (4, "A comment.")]
