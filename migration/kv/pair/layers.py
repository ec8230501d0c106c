"""The decoder layers of a model in a worker, as a pair cuts them: their modules, attention, and KV rows."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_ARGUMENTS = ("positions", "hidden_states", "residual")
_MODEL_ARGUMENTS = {"input_ids", "positions", "intermediate_tensors", "inputs_embeds"}
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
        prefix = lists.pop()
        modules = _submodule(model, prefix)
        if not isinstance(modules, nn.ModuleList):
            raise Unpairable(f"the model's layers are not in a list at {prefix}")
        if sorted(numbered) != list(range(len(modules))) or len(names) != len(modules):
            raise Unpairable("not every layer of the model has one KV cache")
        self.names = [numbered[i] for i in range(len(modules))]
        self.modules: list[nn.Module] = list(modules)
        self._attention = [attention[name] for name in self.names]
        for module in self.modules:
            _check_arguments(module)
        _check_caller(model.get_submodule(prefix.rpartition(".")[0]))
        if len({self.cache(i).data_ptr() for i in range(len(self))}) != len(self):
            raise Unpairable("layers of the model share a KV cache")
        if len({(self.cache(i).shape, self.cache(i).dtype) for i in range(len(self))}) > 1:
            raise Unpairable("the KV caches of the model's layers are not alike")
        if len(self) < 2:
            raise Unpairable("the model has one layer")
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


def _submodule(model: Any, name: str) -> nn.Module | None:
    """A module by its name; None if the model has none, as if attention has another name than its module."""
    try:
        found: nn.Module = model.get_submodule(name)
    except AttributeError:
        return None
    return found


def _check_arguments(module: nn.Module) -> None:
    """Raise Unpairable unless a layer has the arguments positions, hidden states and residual, and no other."""
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if names != _ARGUMENTS:
        raise Unpairable(f"the model's layers have other arguments ({', '.join(names)}) than {', '.join(_ARGUMENTS)}")


def _check_caller(module: nn.Module) -> None:
    """Raise Unpairable if the module with the layers takes more than tokens: it may use that between two layers."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    if more := names - _MODEL_ARGUMENTS - {"self"}:
        raise Unpairable(f"the model's layers are called with {', '.join(sorted(more))} in between")
