"""Logprobs as OpenAI's objects show them, with the token texts of vLLM's server.

A token alone need not be text: byte tokens are parts of characters. As in vLLM (v1/engine/logprobs.py), the token that
completes a character stands for all of it, those before it are empty, and only output tokens are looked back at.
Leading spaces that decoding strips are put back for any SentencePiece tokenizer; vLLM does so for Metaspace ones only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from migration.protocol.core_messages import TokenLogprobs, decode_logprobs

_LEAST = -9999.0
"""What stands for minus infinity, which JSON does not know (as in vLLM)."""
_PARTIAL = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's sign for a space."""
_LONGEST_CHARACTER = 4
"""Bytes of a character, and so the most tokens that it can span."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its logprob, and how many characters of token texts precede it in its answer.

    `likely` are the pairs of token text and logprob that were told with it: first its own, then the likeliest others.
    """

    text: str
    logprob: float
    offset: int
    likely: tuple[tuple[str, float], ...]

    @property
    def end(self) -> int:
        """The offset of the token after it."""
        return self.offset + len(self.text)


class Scorer:
    """Reads the logprobs of one answer, each with those of the `top` likeliest tokens.

    `tokenizer` is the `tokenizers.Tokenizer` behind the model's tokenizer.
    """

    def __init__(self, tokenizer: Any, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._told: dict[int, TokenLogprobs] = {}

    def take(self, extras: Iterable[tuple[int, bytes]]) -> None:
        """The logprobs among the extras, for tokens that are still to be read."""
        for first, rest in extras:
            for index, told in enumerate(decode_logprobs(rest), first):
                self._told[index] = told

    def read(self, outputs: Sequence[int], first: int, end: int) -> list[Scored]:
        """Output tokens [first, end), whose extras have been taken; to be called for each token once, in order."""
        scored = []
        for index in range(first, end):
            logprob, likeliest = self._told.pop(index)
            top = likeliest[: self._top]
            # A token that is among the likeliest was told twice.
            likely = {outputs[index]: logprob} | dict(top)
            before = outputs[max(0, index - _LONGEST_CHARACTER) : index]
            pairs = tuple((self._text(token, before), max(_LEAST, value)) for token, value in likely.items())
            scored.append(Scored(*pairs[0], self._offset, pairs))
            self._offset = scored[-1].end
        return scored

    def _text(self, token: int, before: Sequence[int]) -> str:
        """A token's text after the output tokens `before`."""
        text = self._decode(token)
        if not text.endswith(_PARTIAL):
            raw = self._tokenizer.id_to_token(token) or ""
            spaces = len(raw) - len(raw.lstrip(_SPACE))
            return " " * (spaces - len(text) + len(text.lstrip(" "))) + text
        # The fewest tokens that make it whole are all parts of it.
        texts = (self._decode(*before[-size:], token) for size in range(1, len(before) + 1))
        return next((text for text in texts if not text.endswith(_PARTIAL)), "")

    def _decode(self, *tokens: int) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def chat_logprobs(scored: Sequence[Scored], top: int) -> dict[str, Any]:
    """A chat's logprobs. As in vLLM, the token itself is the first of the `top` likeliest, whatever its rank."""
    content = [
        {
            **_token(token.text, token.logprob),
            "top_logprobs": [_token(*pair) for pair in token.likely[:top]],
        }
        for token in scored
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", errors="replace"))}


def completion_logprobs(scored: Sequence[Scored], top: int) -> dict[str, Any]:
    """A completion's logprobs: the token itself and the `top` likeliest, by their texts."""
    return {
        "text_offset": [token.offset for token in scored],
        "token_logprobs": [token.logprob for token in scored],
        "tokens": [token.text for token in scored],
        "top_logprobs": [dict(token.likely) for token in scored],
    }
