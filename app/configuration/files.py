"""The files and folders of models that the settings name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.settings import ModelSettings, Settings

_FILES = (
    "hf_config_path",
    "mm_encoder_fp8_scale_path",
    "model_weights",
    "reasoning_parser_plugin",
    "spec_model",
    "tokenizer",
)
"""Arguments of engines that name a file or folder, most of them or a model on a hub."""


def missing_files(settings: Settings) -> Iterator[str]:
    """The files and folders that this machine lacks, one line each. Names of models on a hub are not looked up."""
    if not settings.llm_configs:
        yield from _missing_files(settings.models[0], "ingress.frontend_kwargs")
    for number, model in enumerate(settings.llm_configs):
        yield from (f"llm_configs.{number}.{line}" for line in _missing_files(model, "frontend_kwargs"))


def _missing_files(model: ModelSettings, of_frontend: str) -> Iterator[str]:
    named: list[tuple[str, Any]] = [("model_loading_config.model_source", model.model_loading_config.model_source)]
    if model.engine == "vllm":
        kwargs, frontend = model.engine_kwargs, model.frontend_kwargs
        named += [(f"engine_kwargs.{name}", kwargs.get(name)) for name in _FILES]
        draft = kwargs.get("speculative_config")
        if isinstance(draft, Mapping):
            named.append(("engine_kwargs.speculative_config.model", draft.get("model")))
        named.append((f"{of_frontend}.tool_parser_plugin", frontend.get("tool_parser_plugin")))
        named += [(f"{of_frontend}.lora_modules, {each.lora_name}", each.lora_path) for each in model.adapters]
    for where, name in named:
        always = where.endswith("_plugin")
        if isinstance(name, str) and name and (always or is_path(name)) and not Path(name).expanduser().exists():
            yield f"{where}: there is no {name} on this machine"


def is_path(name: str) -> bool:
    """True for the name of a file or folder, rather than of a model on a hub (`name`, `owner/name`) or at a URL."""
    if "://" in name:
        return False
    return name.startswith(("/", ".", "~")) or (name.count("/") > 1 and not name.endswith(".gguf"))
