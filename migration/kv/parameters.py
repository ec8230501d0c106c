"""The parameters of a model's layers: dropped, so that their memory goes back to the machine, and loaded again.

vLLM's layerwise reload (`model_loader/reload`) knows the parameters of each layer as they were before weights were
loaded and processed, and fills and processes a layer once its weights have come through the model's own loader. So
packed and quantized parameters come back as they were. It keeps the old parameters until then, and this does not.

A layer here is a module with parameters of its own. Its buffers stay, and so do modules with buffers only, such as
rotary tables: no file has them. A parameter that two layers share belongs to the first of them (`_Tie`).

For the CPU build alone: freed memory goes back through the allocator of the C library.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

from policies.model import Bytes


class WeightsMissing(Exception):
    """The files of the model do not have the weights of a layer."""


@dataclass(frozen=True, slots=True)
class _Tie:
    """A parameter that a layer shares with an `owner`, which comes before it in the model."""

    layer: nn.Module
    name: str
    owner: nn.Module
    owners_name: str


class Parameters:
    """The parameters of a worker's `model`. `config` is vLLM's."""

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        self._model = model
        self._config = config
        self._ties = _ties(model)
        self._dropped: list[nn.Module] = []

    def why_kept(self) -> str | None:
        """The reason why parameters cannot be dropped, since they would not come back; None if they can."""
        if self._config.lora_config is not None:
            return "with LoRA layers, parameters have not been loaded again yet: remove enable_lora"
        if not hasattr(get_model_loader(self._config.load_config), "get_all_weights"):
            return f"vLLM does not load weights of load_format {self._config.load_config.load_format} again"
        return None

    def size_of(self, layers: Iterable[nn.Module]) -> Bytes:
        """The bytes of layers' parameters before they are processed: some builds keep nothing but packed copies."""
        shared = {(tie.layer, tie.name) for tie in self._ties}
        return Bytes(
            sum(
                parameter.nbytes
                for layer in layers
                for name, parameter in get_layerwise_info(layer).restore_metadata[0].items()
                if (layer, name) not in shared
            )
        )

    @property
    def size(self) -> Bytes:
        """The bytes of all parameters, see `size_of`."""
        return self.size_of(self._model.modules())

    def drop(self, layers: Iterable[nn.Module]) -> None:
        """Drop the parameters of these layers. The model must not compute until they are loaded again."""
        for layer in layers:
            if layer in self._dropped or not any(True for _ in layer.parameters(recurse=False)):
                continue
            self._dropped.append(layer)
            self._drop(layer)
        _trim()

    def load(self) -> None:
        """Load the parameters that were dropped. After any error, all of them are dropped still.

        Raises:
            WeightsMissing: the files lack those of a layer.
            Exception: the model's loader fails.
        """
        model, config = self._model, self._config.model_config
        try:
            with set_current_vllm_config(self._config), torch.device("cpu"), torch.no_grad():
                weights: Any = get_model_loader(self._config.load_config)
                with self._others_kept():
                    model.load_weights(weights.get_all_weights(config, model))
                self._check_loaded()
                finalize_layerwise_reload(model, config)
                for tie in self._of_dropped():
                    tie.layer.register_parameter(tie.name, getattr(tie.owner, tie.owners_name))
                    _process(tie.layer)
        except BaseException:
            for layer in self._dropped:
                get_layerwise_info(layer).reset()
                self._drop(layer)
            raise
        else:
            self._dropped.clear()
        finally:
            # Of copies that the load has made on its way.
            _trim()

    def _drop(self, layer: nn.Module) -> None:
        """Have a layer wait for its weights."""
        # The CPU build's packed copy of the weight.
        layer.__dict__.pop("cpu_linear", None)
        if tied := [tie for tie in self._ties if tie.layer is layer]:
            for tie in tied:
                layer.register_parameter(tie.name, None)
            return
        info, buffers = get_layerwise_info(layer), dict(layer._buffers)
        restore_layer_on_meta(layer, info)
        for name in info.restore_metadata[1]:
            layer._buffers[name] = buffers[name]
        initialize_online_processing(layer)

    def _of_dropped(self) -> Iterator[_Tie]:
        return (tie for tie in self._ties if tie.layer in self._dropped)

    @contextmanager
    def _others_kept(self) -> Iterator[None]:
        """Have the model's loader leave the layers alone that were not dropped: they are processed."""
        with ExitStack() as loaders:
            for layer in self._model.modules():
                if layer not in self._dropped:
                    for parameter in layer.parameters(recurse=False):
                        loaders.enter_context(_without_loader(parameter))
            yield

    def _check_loaded(self) -> None:
        tied = {tie.layer for tie in self._of_dropped()}
        names = {layer: name for name, layer in self._model.named_modules()}
        for layer in self._dropped:
            info = get_layerwise_info(layer)
            if layer not in tied and info.can_load() and info.load_numel <= 0 and info.load_numel_total:
                raise WeightsMissing(f"the model's files have no weights for {names[layer]}")


def _ties(model: nn.Module) -> tuple[_Tie, ...]:
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    ties = []
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            owner, owners_name = owners.setdefault(parameter, (layer, name))
            if owner is not layer:
                ties.append(_Tie(layer, name, owner, owners_name))
    return tuple(ties)


def _process(layer: nn.Module) -> None:
    """Have a layer process its weights, as after a load."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)


@contextmanager
def _without_loader(parameter: nn.Parameter) -> Iterator[None]:
    loader: Mapping[str, Callable[..., None]] = {k: v for k, v in vars(parameter).items() if k == "weight_loader"}
    parameter.weight_loader = _ignore
    try:
        yield
    finally:
        del parameter.weight_loader
        vars(parameter).update(loader)


def _ignore(*_: Any, **__: Any) -> None:
    """A loader of a parameter that has its weights."""


def _trim() -> None:
    """Have the C library give the memory that it keeps for later back to the machine."""
    ctypes.CDLL(None).malloc_trim(0)
