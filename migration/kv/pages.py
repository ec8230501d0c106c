"""The memory of a KV cache whose pages come when they are written, and go when their blocks are withheld.

For the CPU build alone: the cache is anonymous memory of the worker's process, which the kernel maps page by page.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

_MADV_DONTNEED = 4
_LARGE = 1 << 20
"""The size in bytes from which a tensor is the cache: vLLM makes it within the context, and index tensors beside it."""


class UntouchedPages(torch.overrides.TorchFunctionMode):
    """Within it, vLLM's large tensor of zeros, the KV cache, is memory of which no page has been touched.

    `torch.zeros` writes its zeros: a cache would be resident as soon as it is declared. Fresh pages are zeros, too.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch: make one call."""
        kwargs = kwargs or {}
        (size, *_) = args or (None,)
        if func is torch.zeros and isinstance(size, int) and size >= _LARGE and kwargs.get("dtype") is torch.int8:
            return untouched(size)
        return func(*args, **kwargs)


def untouched(size: int) -> torch.Tensor:
    """`size` bytes of zeros as int8, of which no page has been touched; the memory ends with its last tensor."""
    # Private: pages of a shared mapping would outlive what `give_back` does.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.int8)


def give_back(layers: Sequence[torch.Tensor], first: int) -> None:
    """Give the pages of all blocks from `first` on back to the machine. `layers` [B, ...] count blocks on axis 0.

    A page that holds part of an earlier block stays. What was in the blocks is lost: it reads as zeros.

    Raises:
        OSError: the kernel refuses; the pages of some layers may be gone.
    """
    libc, page = ctypes.CDLL(None, use_errno=True), os.sysconf("SC_PAGE_SIZE")
    for start, end in sorted({_bytes_behind(layer, first) for layer in layers}):
        start, end = -(-start // page) * page, end // page * page
        if end > start and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def _bytes_behind(layer: torch.Tensor, first: int) -> tuple[int, int]:
    """The addresses of the beginning of block `first` of a layer, and of the end of its last block."""
    size, last = layer.element_size(), layer.shape[0] - 1
    within = 1 + sum((count - 1) * stride for count, stride in zip(layer.shape[1:], layer.stride()[1:], strict=True))
    start = layer.data_ptr() + first * layer.stride(0) * size
    return start, layer.data_ptr() + (last * layer.stride(0) + within) * size
