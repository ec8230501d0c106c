"""The decoder layers of a model in a worker, as a pair cuts them: their modules, attention, and KV rows."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_ARGUMENTS = ("positions", "hidden_states", "residual")
_NUMBERED = re.compile(r"(.+)\.(\d+)\..+")


class Unpairable(Exception):
    """The reason why an engine's layers cannot run elsewhere."""


class DecoderLayers:
    """The layers 0, 1, ... of a model."""

    def __init__(self, model: Any, attention: Mapping[str, Any], names: Sequence[str]) -> None:
        """`names` are those of the attention modules with KV blocks, as vLLM numbers them.

        Raises:
            Unpairable: the layers are not a plain list of modules, each with one cache of its own.
        """
        found = [_NUMBERED.fullmatch(name) for name in names]
        lists = {match[1] for match in found if match}
        if len(lists) != 1 or None in found:
            raise Unpairable("the model's layers are not one list")
        numbered = {int(match[2]): name for match, name in zip(found, names, strict=True) if match}
        modules = model.get_submodule(lists.pop())
        if sorted(numbered) != list(range(len(modules))) or len(names) != len(modules):
            raise Unpairable("not every layer of the model has one KV cache")
        self.prefix = next(match[1] for match in found if match)
        self.names = [numbered[i] for i in range(len(modules))]
        self.modules: list[nn.Module] = list(modules)
        self._attention = [attention[name] for name in self.names]
        for module in self.modules:
            _check_arguments(module)
        for i in range(len(self)):
            if not self.cache(i).is_contiguous():
                raise Unpairable("the KV cache of a layer is not contiguous")

    def __len__(self) -> int:
        return len(self.modules)

    def cache(self, layer: int) -> torch.Tensor:
        """The KV cache with which the layer computes: [blocks, ...]."""
        cache: torch.Tensor = self._attention[layer].kv_cache
        return cache

    def set_cache(self, layer: int, cache: torch.Tensor) -> None:
        """Have the layer compute with another cache."""
        self._attention[layer].kv_cache = cache

    def rows(self, layer: int) -> torch.Tensor:
        """The cache of a layer as rows of words, [blocks, words]."""
        return as_rows(self.cache(layer))


def as_rows(cache: torch.Tensor) -> torch.Tensor:
    """A layer's KV cache [blocks, ...] as [blocks, words] of 4 bytes, which torch copies fastest on a CPU."""
    return cache.view(cache.shape[0], -1).view(torch.int32)


def _check_arguments(module: nn.Module) -> None:
    """Raise Unpairable unless a layer is called with positions, hidden states and residual alone."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    more = [p for p in parameters[len(_ARGUMENTS) :] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if tuple(p.name for p in parameters[: len(_ARGUMENTS)]) != _ARGUMENTS or more:
        names = ", ".join(p.name for p in parameters)
        raise Unpairable(f"the model's layers have other arguments ({names}) than {', '.join(_ARGUMENTS)}")
