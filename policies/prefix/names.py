"""The names of a prompt's KV blocks, as vLLM names them by default (`prefix_caching_hash_algo: sha256`).

Every full block has a digest of the digest before it, its tokens, and its extra keys: salt, adapter and media. Digests
and names of vLLM's own functions are the same: whoever has vLLM uses those, since they know every kind of extra key.
"""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

_SEED = "vllm-none-hash"
"""vLLM's seed, unless PYTHONHASHSEED is set."""
_LOW = (1 << 64) - 1

DEFAULT_ALGORITHM = "sha256"


@dataclass(frozen=True, slots=True)
class Naming:
    """The way in which an engine names its blocks of `block_size` tokens.

    `mark` is the name of the first block with the tokens 0, 1, 2, ...: it differs if the algorithm or its seed does.
    Names of different namings are unrelated.
    """

    block_size: int
    algorithm: str
    mark: int


def name_of(digest: bytes) -> int:
    """The name of a block: the low 64 bits of its digest."""
    return int.from_bytes(digest, "big") & _LOW


def digests(tokens: Sequence[int], block_size: int, salt: str | None = None, after: bytes | None = None) -> list[bytes]:
    """The digests of the full blocks of `tokens`, with a salt if there is one.

    With `after`, the digest of the block before them, they are blocks in the middle of a prompt.
    """
    found: list[bytes] = []
    last = _digest(_SEED) if after is None else after
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra = (("cache_salt", salt),) if salt and after is None and not start else None
        last = _digest((last, tuple(tokens[start : start + block_size]), extra))
        found.append(last)
    return found


def in_common(names: Sequence[int], others: Sequence[int]) -> int:
    """The number of names at the beginning of both."""
    if names == others:
        return len(names)
    shorter = min(len(names), len(others))
    return next((at for at in range(shorter) if names[at] != others[at]), shorter)


def default_naming(block_size: int) -> Naming:
    """The naming by vLLM's default algorithm and seed."""
    return Naming(block_size, DEFAULT_ALGORITHM, name_of(digests(range(block_size), block_size)[0]))


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
