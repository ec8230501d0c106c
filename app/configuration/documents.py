"""Mell's application in a file: Serve's configuration, or Kubernetes manifests with a RayService, in any document."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

IMPORT_PATH = "mell:build_app"
"""The import path in the source tree and in an installed Mell."""
IMPORT_PATHS = (IMPORT_PATH, "mell.build_app", "app.main:build_app", "app.main.build_app")
"""That function and the one that it calls, each in both of Serve's spellings."""
_BUILD_OPENAI_APP = "ray.serve.llm:build_openai_app"
"""As the other paths of Ray Serve LLM, by the spelling with a colon."""
_RAY_LLM = {
    _BUILD_OPENAI_APP: f"write import_path: {IMPORT_PATH}; the args may stay",
    "ray.serve.llm:build_pd_openai_app": f"write import_path: {IMPORT_PATH}, the args of a replica that does both, and "
    "disaggregation.mode: static or auto",
    "ray.serve.llm:build_dp_openai_app": f"write import_path: {IMPORT_PATH}, and engine_kwargs.tensor_parallel_size "
    "instead of data_parallel_size: a replica is one model",
}


class DocumentError(ValueError):
    """A file without a configuration of Serve. The message is one line."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """One configuration of Serve: the whole of it, and Mell's application in it. `where` begins the lines on it."""

    whole: Mapping[str, Any]
    application: Mapping[str, Any]
    where: str = ""


def read_documents(file: Path) -> list[Any]:
    """The documents of a YAML file, at least one. Raises DocumentError."""
    try:
        documents = [document for document in yaml.safe_load_all(file.read_text("utf-8")) if document is not None]
    except FileNotFoundError:
        raise DocumentError("there is no such file") from None
    except OSError as error:
        raise DocumentError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DocumentError("cannot be read: it is not UTF-8") from None
    except yaml.YAMLError as error:
        raise DocumentError(f"cannot be read: {_in_one_line(error)}") from None
    if not documents:
        raise DocumentError("the file is empty")
    return documents


def unusable(name: str) -> str | None:
    """The reason why a file with this name is no configuration, in one line; None for what may be an import path."""
    if not name.endswith((".yaml", ".yml")) and not Path(name).is_file():
        return None
    try:
        read_documents(Path(name))
    except DocumentError as error:
        return f"{name}: {error}"
    return None


def _in_one_line(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark is not None and problem else " ".join(str(error).split())


def serve_configs(documents: list[Any]) -> tuple[list[ServeConfig], list[str]]:
    """The configurations of Serve with an application of Mell, and the reasons why others have none."""
    found: list[ServeConfig] = []
    errors: list[str] = []
    candidates = [(number, whole) for number, document in enumerate(documents, 1) for whole in _wholes(document)]
    several = len(candidates) > 1
    for number, whole in candidates:
        where = f"document {number}, " if several else ""
        if isinstance(whole, str):
            errors.append(f"{where}{whole}")
            continue
        application, error = _application(whole)
        if application is not None:
            found.append(ServeConfig(whole, application, where))
        if error is not None:
            errors.append(f"{where}{error}")
    if not candidates:
        errors.append("applications: must be a list")
    return found, errors


def _wholes(document: Any) -> Iterator[Mapping[str, Any] | str]:
    """The configurations of Serve in a document, or the error in their place."""
    if not isinstance(document, dict):
        return
    if document.get("kind") == "RayService":
        spec = document.get("spec")
        text = spec.get("serveConfigV2") if isinstance(spec, dict) else None
        try:
            whole = yaml.safe_load(text) if isinstance(text, str) else text
        except yaml.YAMLError as error:
            yield f"spec.serveConfigV2: cannot be read: {_in_one_line(error)}"
            return
        yield whole if isinstance(whole, dict) else "spec.serveConfigV2: must be the text of a Serve configuration"
    elif isinstance(items := document.get("items"), list) and document.get("kind") == "List":
        for item in items:
            yield from _wholes(item)
    elif "kind" not in document or "applications" in document:
        yield document


def _application(whole: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str | None]:
    """Mell's application, or one of Ray Serve LLM whose args Mell takes; and the error in the file."""
    applications = whole.get("applications")
    if not isinstance(applications, list):
        return None, "applications: must be a list"
    entries = [entry for entry in applications if isinstance(entry, dict)]
    mells = [entry for entry in entries if entry.get("import_path") in IMPORT_PATHS]
    if len(mells) == 1:
        return mells[0], None
    for entry in entries:
        given = str(entry.get("import_path"))
        path = given if ":" in given else ":".join(given.rsplit(".", 1))
        if not mells and (reason := _RAY_LLM.get(path)):
            return entry if path == _BUILD_OPENAI_APP else None, f"import_path is {given}: {reason}"
    return None, f"applications: exactly one must have import_path: {IMPORT_PATH}, but {len(mells)} have"
