"""The HTTP call that a task works for: its label, and the requests for engines that vLLM's application made of it.

A layer around vLLM's application begins a call (`CURRENT`); tasks that the application starts for it inherit it.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field

from migration.protocol.reading import Reader
from migration.protocol.request import RequestSpec


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that a replica has taken. `external_id` is vLLM's name for it, which the `n` choices of one share."""

    external_id: str
    spec: RequestSpec
    reader: Reader

    @property
    def tokens(self) -> list[int]:
        """Output tokens so far."""
        return self.reader.cursor.tokens

    @property
    def finish(self) -> str | None:
        """vLLM's finish reason; None until the engine has ended the request."""
        return self.reader.cursor.finish

    @property
    def moves(self) -> int:
        """Migrations so far."""
        return self.reader.moves

    @property
    def resubmissions(self) -> int:
        """Submissions to another replica after a loss so far."""
        return self.reader.resubmissions


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One HTTP call. `label` is the client's name for it; empty: vLLM's name for the request."""

    label: str = ""
    requests: list[EngineRequest] = field(default_factory=list)


CURRENT: ContextVar[ApiCall | None] = ContextVar("current", default=None)
"""The call that the running task works for."""
