"""The scheduler's recordings (`policies.decision.recording`), as files."""

from pathlib import Path
from typing import Protocol

from policies.decision.limits import Terms
from policies.decision.recording import Epoch, epoch_line, terms_line


class Recorder(Protocol):
    """Keeps all epochs."""

    def record(self, epoch: Epoch) -> None:
        """Add an epoch."""
        ...


class FileRecorder:
    """Implements `Recorder`: the terms, then one line per epoch. Every scheduler writes a recording of its own."""

    def __init__(self, path: Path, terms: Terms) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._write(terms_line(terms))

    def record(self, epoch: Epoch) -> None:
        """See `Recorder.record`."""
        self._write(epoch_line(epoch))

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. No epoch may follow."""
        self._file.close()
