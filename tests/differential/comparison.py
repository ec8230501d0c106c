"""The differences of two answers to one request.

Everything is compared exactly except logprobs: in another batch, or after a move, their sums are added up in another
order. Of equally likely candidates beside the sampled token, either server may list another one, and only then.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.differential.answers import Json, ServerAnswer

_SCORES = {"logprob", "token_logprobs", "cumulative_logprob"}


@dataclass(frozen=True)
class Difference:
    """A difference: where, as a path of members with `[]` for the items of lists, and which."""

    path: str
    text: str

    def __str__(self) -> str:
        """One line, shortened."""
        return f"{self.path}: {self.text[:400]}"


def differences(one: ServerAnswer, other: ServerAnswer, noise: float) -> list[Difference]:
    """The differences of two answers to the same request. `noise` is the tolerance for logprobs."""
    heads = [(answer.status, answer.media, answer.ended, answer.broken) for answer in (one, other)]
    if heads[0] != heads[1]:
        return [Difference("", f"{heads[0]} {one.error or ''} != {heads[1]} {other.error or ''}")]
    return list(_differences("", "", one.document, other.document, noise))


def _differences(path: str, name: str, one: Json, other: Json, noise: float) -> Iterator[Difference]:
    if name in ("top_logprobs", "prompt_logprobs") and (table := _candidates(one)) is not None:
        rest = _candidates(other)
        if rest is None or not _alike(table, rest, noise):
            yield Difference(path, f"{one} != {other}")
    elif isinstance(one, dict) and isinstance(other, dict):
        for inner in {**one, **other}:
            where = f"{path}.{inner}".lstrip(".")
            if inner not in one or inner not in other:
                yield Difference(where, "added" if inner in other else "left out")
            else:
                yield from _differences(where, inner, one[inner], other[inner], noise)
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            pairs = enumerate(zip(one, other, strict=False))
            at = next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
            mine, theirs = (str(items[at : at + 1])[:150] for items in (one, other))
            yield Difference(path, f"{len(one)} items != {len(other)} items, from {at} on: {mine} != {theirs}")
        else:
            for mine, theirs in zip(one, other, strict=True):
                yield from _differences(f"{path}[]", name, mine, theirs, noise)
    elif isinstance(one, str) and isinstance(other, str) and one != other:
        yield Difference(path, _parting(one, other))
    elif not (name in _SCORES and _near(one, other, noise)) and (one != other or type(one) is not type(other)):
        yield Difference(path, f"{one!r} != {other!r}")


def _parting(one: str, other: str) -> str:
    """Where two texts part, and their parts around that place."""
    equal = [mine == theirs for mine, theirs in zip(one, other, strict=False)]
    at = equal.index(False) if False in equal else len(equal)
    mine, theirs = (text[max(0, at - 40) : at + 80] for text in (one, other))
    return f"from character {at} on: {mine!r} != {theirs!r}"


def _near(one: Json, other: Json, noise: float) -> bool:
    return isinstance(one, float | int) and isinstance(other, float | int) and abs(one - other) <= noise


@dataclass(frozen=True)
class _Scored:
    logprob: float
    rest: Any


def _candidates(value: Json) -> dict[str, _Scored] | None:
    """The candidates at one position, by token: a table, or a list of objects. None if it is neither."""
    if isinstance(value, dict) and value:
        return {
            token: _Scored(entry["logprob"], _without_rank(entry)) if isinstance(entry, dict) else _Scored(entry, None)
            for token, entry in value.items()
        }
    if isinstance(value, list) and value and all(isinstance(entry, dict) and "logprob" in entry for entry in value):
        # Several tokens may have one text: they are numbered.
        texts = [entry["token"] for entry in value]
        return {
            f"{text}/{texts[:at].count(text)}": _Scored(entry["logprob"], _without_rank(entry))
            for at, (text, entry) in enumerate(zip(texts, value, strict=True))
        }
    return None


def _without_rank(entry: Mapping[str, Json]) -> dict[str, Json]:
    """Of equally likely tokens, either may be the higher one."""
    return {name: value for name, value in entry.items() if name not in ("logprob", "rank")}


def _alike(one: Mapping[str, _Scored], other: Mapping[str, _Scored], noise: float) -> bool:
    """True if two tables of candidates agree, but for those as likely as the last: others may be as likely."""
    scores = [sorted(candidate.logprob for candidate in table.values()) for table in (one, other)]
    shared = one.keys() & other.keys()
    return (
        len(one) == len(other)
        and all(_near(a, b, noise) for a, b in zip(*scores, strict=True))
        and all(_near(one[t].logprob, other[t].logprob, noise) and one[t].rest == other[t].rest for t in shared)
        and all(_near(one[t].logprob, scores[0][0], noise) for t in one.keys() - shared)
    )


# --- ties ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """A sampled token's text and logprob, and the likeliest tokens at its place with theirs."""

    text: str
    logprob: float
    likeliest: Mapping[str, float]


def proven_tie(text: str, tokens: Sequence[Candidates], noise: float) -> bool:
    """True if `tokens` and the text part at a tie.

    At the first token that does not continue `text`, another candidate does and is as likely, within `noise`. False if
    there is no such token, so that equal texts are no tie.
    """
    at = 0
    for token in tokens:
        if not text.startswith(token.text, at):
            rivals = [score for rival, score in token.likeliest.items() if rival and text.startswith(rival, at)]
            return any(abs(score - token.logprob) <= noise for score in rivals)
        at += len(token.text)
    return False


def scored_tokens(document: Json, choice: int = 0) -> list[Candidates]:
    """The tokens of a choice of a completion or a chat with logprobs; empty without."""
    logprobs = document["choices"][choice].get("logprobs") or {}
    if "tokens" not in logprobs:
        return [
            Candidates(t["token"], t["logprob"], {o["token"]: o["logprob"] for o in t["top_logprobs"]})
            for t in logprobs.get("content") or ()
        ]
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [Candidates(text, score, table or {}) for text, score, table in zip(*columns, strict=True)]
