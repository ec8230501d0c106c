"""Engines without a model: the next token is a function of the context, and KV blocks hold the tokens themselves.

A block that came from elsewhere is read back as what it holds, so corrupted blocks change the output, as they do in a
real engine.
"""

import hashlib
import struct
from collections.abc import Sequence

from migration.kv.staging import HEADER, Segments
from migration.protocol import logprobs
from migration.protocol.messages import SlotRef
from policies.model import Bytes

TOKEN_BYTES = 4
"""Bytes that one token takes in a block."""

_VOCABULARY = 500
"""Ids from here on are not generated: the embedded model's tokenizer knows the ones below."""
_FIRST_TOKEN = 3
"""Ids below are special; 2 ends a text."""


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as blocks hold them, little-endian."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpack(held: bytes | memoryview) -> tuple[int, ...]:
    """The inverse of `pack`."""
    return struct.unpack(f"<{len(held) // TOKEN_BYTES}i", held)


class Reading:
    """A context as its blocks hold it, read from the first token on; a token more takes constant time."""

    def __init__(self, held: bytes = b"") -> None:
        self._digest = hashlib.blake2b(held, digest_size=4)

    def extend(self, held: bytes) -> None:
        """Read on."""
        self._digest.update(held)

    def next_token(self) -> int:
        """The token that follows what has been read."""
        return _FIRST_TOKEN + self._drawn() % (_VOCABULARY - _FIRST_TOKEN)

    def next_logprobs(self, top: int) -> bytes:
        """That token's logprobs with the `top` likeliest, packed: made up of what has been read, too.

        The token is the likeliest one; those with the next ids follow at falling logprobs.
        """
        first, best = self.next_token() - _FIRST_TOKEN, -(self._drawn() % 512) / 256
        ids = [_FIRST_TOKEN + (first + i) % (_VOCABULARY - _FIRST_TOKEN) for i in range(top)]
        return logprobs.pack(best, ids, [best - i / 4 for i in range(top)])

    def _drawn(self) -> int:
        return int.from_bytes(self._digest.digest(), "little")


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The output of an undisturbed run."""
    reading, outputs = Reading(pack(prompt)), []
    for _ in range(count):
        outputs.append(reading.next_token())
        reading.extend(pack(outputs[-1:]))
    return tuple(outputs)


class TokenSlots:
    """Puts such blocks into staging slots, and gets them out again."""

    def __init__(self) -> None:
        self._segments = Segments()
        self._tickets = iter(range(1, 1 << 62))

    def write(self, segment: str, offset: int, held: bytes) -> tuple[SlotRef, Bytes]:
        """Fill a slot; returns it with its new ticket, and the bytes to transfer (header included).

        Raises:
            TransferFailed: it does not fit, or the segment is gone.
        """
        memory = self._segments.get(segment)
        memory.view(offset + HEADER, len(held))[:] = held
        ticket = next(self._tickets)
        memory.stamp(offset, ticket)
        return SlotRef(segment, offset, ticket), Bytes(HEADER + len(held))

    def read(self, slot: SlotRef, size: int) -> bytes:
        """A copy of the first `size` bytes. Raises TransferFailed unless the slot carries its ticket."""
        return bytes(self._segments.payload(slot, size))
