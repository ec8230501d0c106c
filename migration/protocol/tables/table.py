"""The interpreter of the protocol's tables, and the theory of operation behind them.

Three parties serve one request: the replica that runs it and gives it away (`source`), the replica that takes it
over (`target`), and the ingress that delivers its output (`reader`). Each is a literal table from (state, event) to
(next state, commands). Nothing in a table waits, sends or looks at a clock: shells turn messages, results and
time-outs into events, and commands into deeds. The tables have only to agree with each other, whatever the network
does to the messages between them and however long one of the three stands still. Five rules make that small enough to
be proved.

1. TOKENS ARE THE REQUEST. Whoever has the prompt, the sampling parameters and the output tokens so far can go on with
   it. KV blocks are a cache: their loss turns a migration by KV into one by tokens, in every state, and never ends one.
   So no row has to ask how much of a copy has arrived.

2. A HOP IS A LICENCE, AND THE READER HOLDS THE REGISTER. Each run of a request has a hop of its own. The reader takes
   tokens of one hop and drops those of older ones. Two engines may compute the same request, which costs work and can
   repeat no token. Hops come in terms. Only the reader begins a term, so a replica that was given up cannot know, and
   cannot reuse, what came after it.

3. ONLY THE READER MAKES AN OWNER. An owner goes on by itself: nothing but its reader ends it. There are three ways to
   become one, each a decision of the reader: it submits the request (SUBMITTED), attaches to a target (ATTACHED), or
   has a source keep the request (KEPT). A source cannot make its target the owner, since it cannot know whether the
   reader still reads from that source. Before the reader's decision the target's run is on probation, under a lease.

4. A SOURCE THAT HAS SENT THE REQUEST IS SILENT UNTIL IT KNOWS. Freezing is muting: the source keeps new tokens back,
   and as it sends the request it has its engine compute none (HALT). That makes giving up a single command (UNMUTE),
   which continues from the tokens, and it makes waiting safe: a muted source claims nothing. From the moment it sends
   the request it may unmute only if the target refused or the reader decided so. A time-out is neither: it is about
   this side's patience, not about the other side's state. The source then asks (DOUBT).

5. THE READER DECIDES ONCE PER ATTEMPT. KEPT and ATTACHED exclude each other: after one of them the reader never
   decides the other for the same attempt, not even if its first message may have been lost. Where it does not know
   whether a message arrived it begins a new term, under which neither answer matters any more.

Why a lease at the target and none at the source? A lease at the source would have to be renewed by the reader in
time, and the reader would have to wait it out before it continues elsewhere, after every death. Deaths are what the
reader is there to survive quickly. The register of rule 2 does the same without waiting: a source that wakes up too
late is outdated rather than wrong, and its first event brings it the order to end (RELEASE_*).

Ties. A table takes one event at a time, in the order in which its shell got them; whatever two messages cross on the
way is two orders of events, and both are legal. A shell ends the activity of a state as it enters another one, and
never feeds its late result; only the target's table takes late results, which its callers cannot hold back. An event
without an entry is illegal: `feed` raises and changes nothing. Events that no longer matter have entries that change
nothing; they are listed, so that a forgotten one is an error.

`tests/migration/protocol/test_joint.py` walks all joint states of the three tables. A new row is a new line of its
model: whoever adds a message, or a way to repeat or delay one, adds it to `joint.py` beside it first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from migration.protocol.errors import IllegalEvent

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
C = TypeVar("C", bound=StrEnum)

Table = Mapping[S, Mapping[E, tuple[S, tuple[C, ...]]]]


@dataclass(slots=True)
class Session(Generic[S, E, C]):
    """One party's session: the table, the state, and the events that led here."""

    table: Table[S, E, C]
    state: S
    history: list[E] = field(default_factory=list)

    def allows(self, event: E) -> bool:
        """True if `feed(event)` is legal now."""
        return event in self.table[self.state]

    def check(self, event: E) -> None:
        """Raise IllegalEvent unless `feed(event)` is legal now: for a caller that changes something else before."""
        if not self.allows(event):
            raise IllegalEvent(f"{event} in state {self.state}")

    def feed(self, event: E) -> tuple[C, ...]:
        """Take an event; return the commands to execute, in order.

        Raises:
            IllegalEvent: the state does not allow it; the session is unchanged.
        """
        self.check(event)
        self.state, commands = self.table[self.state][event]
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
