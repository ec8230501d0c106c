"""The logprob of one output token, and the likeliest tokens with theirs, packed.

It crosses processes with every token, and both ends keep it while a stream may still break: so it travels packed, in
4 + 8 k bytes for k likeliest tokens, where the same in Python objects takes some hundred bytes per pair. Engines
compute logprobs in float32 (vLLM: v1/sample/sampler.py, `compute_logprobs`), so nothing is lost.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a token's probability; `top` are pairs of token id and logprob, the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def pack(logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float]) -> bytes:
    """Logprobs of one token, as they travel. Raises struct.error unless the likeliest have a logprob each."""
    count = len(top_ids)
    return struct.pack(f"<f{count}i{count}f", logprob, *top_ids, *top_logprobs)


def unpack(packed: bytes) -> TokenLogprobs:
    """The inverse of `pack`."""
    count = len(packed) // 8
    logprob, *pairs = struct.unpack(f"<f{count}i{count}f", packed)
    return TokenLogprobs(logprob, tuple(zip(pairs[:count], pairs[count:], strict=True)))
