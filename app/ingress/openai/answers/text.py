"""From token ids to text, step by step: UTF-8 sequences that span tokens, and stop strings that span steps."""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tokenizers.decoders import DecodeStream


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that a step adds; `stopped` when a stop string ended the answer (the text ends before it)."""

    text: str
    stopped: bool = False


class TextStream:
    """Detokenizes one answer. `tokenizer` is the `tokenizers.Tokenizer` behind the model's tokenizer.

    Text that could be the beginning of a stop string is held back until it is known not to be. A stop string that is
    complete within the first `min_tokens` tokens does not end the answer. Special tokens have a text only if
    `special_tokens`.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: tuple[int, ...],
        stops: tuple[str, ...],
        min_tokens: int = 0,
        special_tokens: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=_context(tokenizer, prompt), skip_special_tokens=not special_tokens)
        self._stops = stops
        self._hold = max(map(len, stops), default=1) - 1
        self._held = ""
        self._exempt_tokens = min_tokens
        self._exempt = 0
        """So much of what is held back is of exempt tokens."""

    def feed(self, tokens: tuple[int, ...]) -> Piece:
        """The text that these tokens complete."""
        exempt, tokens = tokens[: self._exempt_tokens], tokens[self._exempt_tokens :]
        self._exempt_tokens -= len(exempt)
        spared = self._decode(exempt)
        fresh = spared + self._decode(tokens)
        if not self._stops:
            return Piece(fresh)
        text = self._held + fresh
        start = len(self._held) + len(spared) if exempt else self._exempt
        # The stop string that is complete first, and of those the one listed first, as in vLLM: the answer is then the
        # same however its tokens came, one by one or (after a move) many at once.
        found = [
            (i + len(stop), i) for stop in self._stops if (i := text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        if found:
            self._held = ""
            _, begin = min(found, key=itemgetter(0))
            return Piece(text[:begin], stopped=True)
        keep = _overlap(text, self._stops, self._hold)
        self._held = text[len(text) - keep :]
        self._exempt = max(0, start - len(text) + keep)
        return Piece(text[: len(text) - keep])

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return "".join(self._stream.step(self._tokenizer, token) or "" for token in tokens)

    def flush(self) -> str:
        """What was held back, once no more tokens come."""
        held, self._held = self._held, ""
        return held


_CONTEXT = range(4, 24)


def _context(tokenizer: Any, prompt: tuple[int, ...]) -> list[int]:
    """The last tokens of a prompt, which tell the decoder what precedes the first output token: as few as will do.

    They must be whole characters. The decoder would give out one that is not, and all before it, with the answer.
    """
    for size in _CONTEXT:
        tokens = list(prompt[-size:])
        if "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode(tokens, skip_special_tokens=True):
            return tokens
    return []


def _overlap(text: str, stops: tuple[str, ...], limit: int) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    for size in range(min(limit, len(text)), 0, -1):
        end = text[-size:]
        if any(stop.startswith(end) for stop in stops):
            return size
    return 0
