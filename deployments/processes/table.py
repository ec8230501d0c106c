"""The kernel's table of processes, as /proc shows it."""

import ctypes
import os
import signal
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4
_SIGKILL = 1 << (signal.SIGKILL - 1)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A unique identity of a process: the kernel reuses ids, but not with the same start time."""

    pid: int
    started: int
    """Clock ticks since the machine's start."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`."""
        pid, started = text.split(":")
        return cls(int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A row of the table."""

    identity: ProcessIdentity
    name: str
    """The first 15 characters of the program's name, or of the process's title if it has set one."""
    zombie: bool
    """True if the process has ended and its parent has not collected its exit status yet."""
    ending: bool
    """True if the process does nothing any more: it has ended, exits, or has been killed. Freeing gigabytes of memory
    takes seconds."""
    parent: int
    group: int

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.identity.pid


def entry_of(pid: int) -> ProcessEntry | None:
    """The row of a process; None if there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    head, _, tail = stat.rpartition(")")  # the name may hold spaces and parentheses
    fields = tail.split()
    name = head.partition("(")[2]
    zombie = fields[0] in "ZX"
    ending = zombie or bool(int(fields[6]) & _PF_EXITING or int(fields[28]) & _SIGKILL)
    identity = ProcessIdentity(pid, int(fields[19]))
    return ProcessEntry(identity, name, zombie, ending, parent=int(fields[1]), group=int(fields[2]))


def identity_of(pid: int) -> ProcessIdentity:
    """The identity of the process that has this id now. Raises ProcessLookupError."""
    entry = entry_of(pid)
    if entry is None:
        raise ProcessLookupError(pid)
    return entry.identity


def is_running(process: ProcessIdentity) -> bool:
    """True while the process has not ended. A stopped process counts as running."""
    entry = entry_of(process.pid)
    return entry is not None and entry.identity == process and not entry.zombie


def is_ending(pid: int) -> bool:
    """True if the process does nothing any more, see `ProcessEntry.ending`, or does not exist."""
    entry = entry_of(pid)
    return entry is None or entry.ending


def running() -> list[ProcessEntry]:
    """All processes that have not ended."""
    entries = (entry_of(int(folder.name)) for folder in _PROC.iterdir() if folder.name.isdigit())
    return [entry for entry in entries if entry is not None and not entry.zombie]


def members(group: int) -> list[ProcessEntry]:
    """The running processes of a process group."""
    return [entry for entry in running() if entry.group == group]


def descendants(pid: int) -> list[ProcessEntry]:
    """The running processes below a process, children before grandchildren."""
    children: dict[int, list[ProcessEntry]] = defaultdict(list)
    for entry in running():
        children[entry.parent].append(entry)
    found = list(children[pid])
    for entry in found:  # the list grows in the loop
        found += children[entry.pid]
    return found


def command_line(pid: int) -> str:
    """The command line or title of a process; empty if it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def adopt_orphans() -> None:
    """Make this process the parent of orphans below it, so that they stay its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the one that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
