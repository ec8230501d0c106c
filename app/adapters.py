"""LoRA adapters as settings and orders name them, and the numbers by which all processes know them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from deployments.config import SettingsSection
from migration.protocol.core_messages import Adapter

MAX_NAME = 256
"""Characters of a name, which is that of a model in requests."""
_BITS = 0x7FFF_FFFF
"""vLLM's model runner has a signed number of 32 bits for each request; 0 stands for none."""


class LoraModule(SettingsSection):
    """One entry of `lora_modules`, with vLLM's members."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    path: str = Field(min_length=1)
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


def read_modules(entries: Any) -> list[dict[str, Any]]:
    """The entries of `lora_modules` as objects, with absolute paths of folders that exist here.

    Raises:
        ValueError: an entry is neither NAME=PATH nor an object with vLLM's members, or two have the same name.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError("lora_modules must be a list")
    modules = [_read(entry) for entry in entries]
    names = [module.name for module in modules]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"lora_modules: several entries are named {', '.join(doubled)}")
    return [module.model_dump(exclude_defaults=True) for module in modules]


def _read(entry: Any) -> LoraModule:
    if isinstance(entry, str):
        name, _, place = entry.partition("=")
        members: Any = {"name": name, "path": place}
    else:
        members = entry
    try:
        module = LoraModule.model_validate(members)
    except ValidationError as error:
        raise ValueError(f"lora_modules: {entry!r} is neither NAME=PATH nor an object: {_first(error)}") from None
    path = Path(module.path).expanduser()
    # Replicas have another working directory. What does not exist here is the name of a repository on a hub.
    return module.model_copy(update={"path": str(path.absolute())}) if path.exists() else module


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"


def listed_adapters(modules: Sequence[dict[str, Any]]) -> tuple[Adapter, ...]:
    """The adapters of entries that `read_modules` has returned. Other files at the same path are another adapter."""
    if not modules:
        return ()
    from deployments.engine.weights import name_weights  # Takes a moment to import, for what few configurations have.

    return tuple(
        Adapter(
            module["name"],
            adapter_number(module["name"], module["path"], name_weights(module["path"], None)),
            module["path"],
            module.get("base_model_name"),
            is_3d_lora_weight=module.get("is_3d_lora_weight", False),
        )
        for module in modules
    )


def adapter_number(name: str, path: str, revision: str = "") -> int:
    """vLLM's number of an adapter, the same one in every process.

    `revision` distinguishes an adapter that is loaded anew from an earlier one of the same name and path, with which
    requests may still run.
    """
    digest = hashlib.sha256("\0".join((name, path, revision)).encode()).digest()
    return (int.from_bytes(digest[:4]) & _BITS) or 1
