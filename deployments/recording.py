"""Epochs as JSON lines: what was observed and what was decided, to be read, and played through the planner again."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from policies.decision.observation import Observation
from policies.decision.planner import LiveLimits, Mode
from policies.model import RequestId
from policies.plan import Move, Plan


@dataclass(frozen=True, slots=True)
class Setting:
    """How the planner was made whose epochs follow: a recording's first line."""

    policy: str
    limits: LiveLimits
    epoch_s: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch. `put_off` are the requests whose orders were not carried out in it."""

    seen: Observation
    mode: Mode
    plan: Plan
    orders: tuple[Move, ...]
    put_off: tuple[RequestId, ...] = ()


_SETTING: TypeAdapter[Setting] = TypeAdapter(Setting)
_EPOCH: TypeAdapter[Epoch] = TypeAdapter(Epoch)


class Recorder:
    """Writes a recording, one line per epoch; every scheduler that starts begins another."""

    def __init__(self, path: Path, setting: Setting) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._write(_SETTING.dump_json(setting))

    def record(self, epoch: Epoch) -> None:
        """Add an epoch."""
        self._write(_EPOCH.dump_json(epoch))

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """No more epochs."""
        self._file.close()


def read_recording(path: Path) -> tuple[Setting, Iterator[Epoch]]:
    """A recording's setting and epochs. Raises ValueError, here or while iterating, with the line that is wrong."""
    lines = path.read_bytes().splitlines()
    setting: Setting = _parse(_SETTING, lines[0] if lines else b"", path, 1)
    return setting, (_parse(_EPOCH, line, path, number) for number, line in enumerate(lines[1:], 2))


def _parse(adapter: TypeAdapter[Any], line: bytes, path: Path, number: int) -> Any:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        raise ValueError(f"{path}, line {number}: {error.errors()[0]['msg']}") from None
