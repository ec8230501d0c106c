"""The calls from a worker to its buddy's: MessagePack behind its length, over a Unix socket; tensors in shared memory.

Each call is answered before the next one on its connection. The caller owns the memory, and the buddy maps it: what a
call brings along is there until the answer, and so is what the answer brings back.
"""

import math
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from migration.protocol.errors import TransferFailed

_LENGTH = struct.Struct("<I")
_LARGEST = 1 << 26
_ALIGNED = 64


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first call. `blocks` are those of each layer of the caller's cache; `segment` is its shared memory."""

    epoch: int
    blocks: int
    segment: str


class HopCall(msgspec.Struct, tag=True, frozen=True):
    """Run layers [first, last) for the tokens of one step of the caller.

    The memory holds `HopTensors`; the answer leaves the result in place of hidden states and residual. `actual`,
    `longest_query` and `longest_context` are vLLM's numbers of the step (`CommonAttentionMetadata`).
    """

    first: int
    last: int
    tokens: int
    requests: int
    columns: int
    has_residual: bool
    actual: int
    longest_query: int
    longest_context: int


class PutRows(msgspec.Struct, tag=True, frozen=True):
    """Copy rows of a layer, which are in the memory, into the caller's blocks here.

    The answer to the `final` call of a layer is the promise to keep its parameters and these blocks until `FreeLayer`,
    or until the connection ends.
    """

    layer: int
    rows: list[int]
    final: bool = False


class GetRows(msgspec.Struct, tag=True, frozen=True):
    """Copy rows of a layer of the caller's blocks here into the memory."""

    layer: int
    rows: list[int]


class MoveRows(msgspec.Struct, tag=True, frozen=True):
    """Blocks of the caller have changed their ids, (from, to), in all of its layers here."""

    moved: list[tuple[int, int]]


class LoseRows(msgspec.Struct, tag=True, frozen=True):
    """Give the memory of the caller's blocks from `first` on back to the machine."""

    first: int


class FreeLayer(msgspec.Struct, tag=True, frozen=True):
    """The caller has the layer itself: free its blocks here."""

    layer: int


class Answer(msgspec.Struct, frozen=True):
    """The answer to a call; `failure` is the reason why nothing was done. `seconds` passed since the call was here."""

    failure: str | None = None
    seconds: float = 0.0


Call = Hello | HopCall | PutRows | GetRows | MoveRows | LoseRows | FreeLayer

_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def send(to: socket.socket, message: Call | Answer) -> None:
    """Send one message. Raises OSError."""
    body = _encoder.encode(message)
    to.sendall(_LENGTH.pack(len(body)) + body)


def receive_call(of: socket.socket) -> Call | None:
    """The next call; None once the other end has closed. Raises OSError, or ValueError for anything else."""
    body = _receive(of)
    return None if body is None else _calls.decode(body)


def receive_answer(of: socket.socket) -> Answer:
    """The next answer. Raises OSError, ValueError for anything else, and ConnectionError once the other end is gone."""
    body = _receive(of)
    if body is None:
        raise ConnectionResetError("the connection has ended")
    return _answers.decode(body)


def _receive(of: socket.socket) -> bytes | None:
    head = _exactly(of, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _LARGEST:
        raise ValueError(f"a message of {length} bytes")
    return _exactly(of, length)


def _exactly(of: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        part = of.recv(size - len(found))
        if not part:
            return None
        found += part
    return bytes(found)


class HopTensors(NamedTuple):
    """The tensors of a hop, over shared memory.

    positions [tokens], hidden and residual [tokens, hidden size], starts [requests + 1], lengths [requests],
    table [requests, columns], slots [tokens].
    """

    positions: torch.Tensor
    hidden: torch.Tensor
    residual: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor


def hop_bytes(tokens: int, requests: int, columns: int, width: int, dtype: torch.dtype) -> int:
    """The memory of a hop with that many tokens, requests, and columns of their block tables."""
    return sum(
        _aligned(math.prod(shape) * kind.itemsize) for shape, kind in _of(tokens, requests, columns, width, dtype)
    )


def hop_tensors(memory: memoryview, call: HopCall, width: int, dtype: torch.dtype) -> HopTensors:
    """The tensors of a hop in memory. Raises TransferFailed if the memory is too small."""
    found: list[torch.Tensor] = []
    offset = 0
    for shape, kind in _of(call.tokens, call.requests, call.columns, width, dtype):
        size = math.prod(shape)
        if offset + size * kind.itemsize > len(memory):
            raise TransferFailed("a hop exceeds the shared memory")
        found.append(torch.frombuffer(memory, dtype=kind, count=size, offset=offset).view(shape))
        offset += _aligned(size * kind.itemsize)
    return HopTensors(*found)


def _of(
    tokens: int, requests: int, columns: int, width: int, dtype: torch.dtype
) -> Sequence[tuple[tuple[int, ...], torch.dtype]]:
    return (
        ((tokens,), torch.int64),
        ((tokens, width), dtype),
        ((tokens, width), dtype),
        ((requests + 1,), torch.int32),
        ((requests,), torch.int32),
        ((requests, columns), torch.int32),
        ((tokens,), torch.int64),
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def rows_of(memory: Any, count: int, words: int) -> torch.Tensor:
    """`count` rows of a layer in shared memory, [count, words] of 4 bytes. Raises TransferFailed if it is too small."""
    if 4 * count * words > len(memory):
        raise TransferFailed(f"{count} rows of KV exceed the shared memory")
    return torch.frombuffer(memory, dtype=torch.int32, count=count * words).view(count, words)
