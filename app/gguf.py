"""Reads models in llama.cpp's format: metadata, and tensors as float32. Only the tensor types that Mell's model has.

A file holds a header, metadata, the tensors' names, shapes and places, and their data. Numbers are little-endian.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"GGUF"
_VERSION = 3
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""The formats of numbers (`struct`), by their codes in the metadata."""

_ALIGNMENT = "general.alignment"


@dataclass(frozen=True, slots=True)
class _Type:
    """A tensor type: the layout of a block of `values` numbers."""

    values: int
    layout: np.dtype[Any]


_TYPES = {
    0: _Type(1, np.dtype("<f4")),
    3: _Type(32, np.dtype([("scale", "<f2"), ("least", "<f2"), ("quants", "u1", 16)])),
    8: _Type(32, np.dtype([("scale", "<f2"), ("quants", "i1", 32)])),
}
"""F32, Q4_1 and Q8_0, by their codes."""


class GgufFile:
    """A whole file in memory."""

    def __init__(self, data: bytes) -> None:
        """Raises ValueError if the file is of another format or version."""
        self._data = data
        self._at = 0
        if self._take("4sI") != (_MAGIC, _VERSION):
            raise ValueError(f"no GGUF file of version {_VERSION}")
        tensors, entries = self._take("QQ")
        self.metadata: Mapping[str, Any] = {self._string(): self._value() for _ in range(entries)}
        self._tensors = {self._string(): self._place() for _ in range(tensors)}
        alignment = self.metadata.get(_ALIGNMENT, 32)
        self._begin = -(-self._at // alignment) * alignment

    def tensors(self) -> "dict[str, NDArray[np.float32]]":
        """The tensors by name. Raises ValueError for an unknown type."""
        return {name: self._tensor(*place) for name, place in self._tensors.items()}

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _string(self) -> str:
        (size,) = self._take("Q")
        self._at += size
        return self._data[self._at - size : self._at].decode()

    def _value(self) -> Any:
        (kind,) = self._take("I")
        return self._value_of(kind)

    def _value_of(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_NUMBERS[kind])[0]
        element, count = self._take("IQ")
        if element in (_STRING, _ARRAY):
            return [self._value_of(element) for _ in range(count)]
        return list(self._take(f"{count}{_NUMBERS[element]}"))

    def _place(self) -> tuple[tuple[int, ...], int, int]:
        """The shape of a tensor, outermost dimension first, its type, and its offset in the data."""
        (dimensions,) = self._take("I")
        shape = self._take(f"{dimensions}Q")
        kind, offset = self._take("IQ")
        return shape[::-1], kind, offset

    def _tensor(self, shape: tuple[int, ...], kind: int, offset: int) -> "NDArray[np.float32]":
        if kind not in _TYPES:
            raise ValueError(f"tensors of type {kind} cannot be read")
        of = _TYPES[kind]
        blocks = np.frombuffer(self._data, of.layout, math.prod(shape) // of.values, self._begin + offset)
        return _numbers(kind, blocks).reshape(shape)


def _numbers(kind: int, blocks: NDArray[Any]) -> "NDArray[np.float32]":
    if kind == 0:
        return blocks.astype(np.float32)
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == 8:
        eights: NDArray[np.float32] = scale * blocks["quants"].astype(np.float32)
        return eights
    packed = blocks["quants"]
    quants = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    fours: NDArray[np.float32] = scale * quants + blocks["least"].astype(np.float32)[:, None]
    return fours
