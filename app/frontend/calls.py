"""The HTTP call that a task works for: its label, and the requests for engines that vLLM's application made of it.

A layer around vLLM's application begins a call (`CURRENT`); tasks that the application starts for it inherit it.
"""

import re
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field

from app.ingress.errors import ApiError
from app.ingress.telemetry.requests import StepTimer
from migration.protocol.reading import Reader
from migration.protocol.request import RequestSpec
from policies.precedence import DEFAULT_CLASS


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
        """vLLM's finish reason; None before the end."""
        return self.reader.cursor.finish

    @property
    def moves(self) -> int:
        """Migrations so far."""
        return self.reader.moves

    @property
    def resubmissions(self) -> int:
        """Submissions to another replica after a loss so far."""
        return self.reader.resubmissions


_BEAM = re.compile(r"-[0-9a-f]+-beam-[0-9]+$")
"""The end of vLLM's names for the requests of a beam search (vllm/entrypoints/generate/beam_search/online.py)."""


@dataclass(slots=True)
class ApiCall:
    """One HTTP call. `label` is the client's name for it; empty: vLLM's name for the request.

    `timer` begins to time the outputs of one request. `prepared` is called once vLLM's application has made a request
    of the call's media, `taken` whenever a replica has taken a request. `context` is that of the call, for tasks that
    work for it. `service_class` is that of its requests. Calls of one `session` have prompts in common; empty: no
    session.
    """

    label: str = ""
    timer: Callable[[], StepTimer] | None = None
    prepared: Callable[[], None] = lambda: None
    taken: Callable[[], None] = lambda: None
    context: Context = field(default_factory=copy_context)
    requests: list[EngineRequest] = field(default_factory=list)
    """Its requests; of a beam search, which makes one for every token of every beam, the first for each prompt."""
    prompts: dict[str, RequestSpec] = field(default_factory=dict)
    """One request for each distinct prompt, by vLLM's name for it."""
    failure: ApiError | None = None
    """The error of a request that engines have not taken, or of vLLM's application; None so far."""
    service_class: str = DEFAULT_CLASS
    tenant: str = ""
    """Calls share cached KV only with those of the same tenant, or with others without one."""
    session: str = ""
    _beam_tokens: int = 0

    def add(self, request: EngineRequest) -> None:
        """A replica has taken a request of the call."""
        prompt = _BEAM.sub("", request.external_id)
        if prompt != request.external_id and prompt in self.prompts:
            self._beam_tokens += 1
        else:
            self.prompts.setdefault(prompt, request.spec)
            self.requests.append(request)
        self.taken()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(spec.prompt_tokens for spec in self.prompts.values())

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all requests so far."""
        return self._beam_tokens + sum(len(request.tokens) for request in self.requests)


CURRENT: ContextVar[ApiCall | None] = ContextVar("current", default=None)
"""The call that the running task works for."""
