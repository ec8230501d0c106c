"""The interpreter of transition tables: a few lines, so that the tables are all there is to know.

A table maps (state, event) to (next state, commands). An event without an entry is illegal: `feed` raises
and changes nothing. Commands are names; the shell that executes them knows their arguments. Neither tables
nor interpreter know time, Ray or vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from migration.errors import IllegalEvent

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)

Table = Mapping[S, Mapping[E, tuple[S, tuple[C, ...]]]]


@dataclass(slots=True)
class Session(Generic[S, E, C]):
    """One side of one migration: the table, the state, and the events that led here."""

    table: Table[S, E, C]
    state: S
    history: list[E] = field(default_factory=list)

    def allows(self, event: E) -> bool:
        """Whether `feed(event)` is legal now."""
        return event in self.table[self.state]

    def feed(self, event: E) -> tuple[C, ...]:
        """Take an event; return the commands to execute, in order.

        Raises:
            IllegalEvent: the state does not allow it; the session is unchanged.
        """
        try:
            self.state, commands = self.table[self.state][event]
        except KeyError:
            raise IllegalEvent(f"{event} in state {self.state}") from None
        self.history.append(event)
        return commands


def diagram(table: Table[S, E, C], title: str) -> str:
    """The table as a Mermaid state diagram; self-loops without commands are left out."""
    lines = [f"---\ntitle: {title}\n---", "stateDiagram-v2"]
    for state, row in table.items():
        for event, (following, commands) in row.items():
            if following is state and not commands:
                continue
            effect = f" / {', '.join(commands)}" if commands else ""
            lines.append(f"    {state} --> {following}: {event}{effect}")
    return "\n".join(lines) + "\n"
