"""What an ingress counts of its requests, and the line that it logs of each.

with observed.begin("completions") as watch:       # from the arrival; what is raised in here is the outcome
    watch.key = ...                                # the name of the client's key, once it is known
    watch.accepted(id, label, prompts)             # it is clear what is asked for
    steps = watch.choice(conversation)             # for every choice of the answer, when it runs
    steps.step()                                   # the tokens of one engine step are passed on
    watch.answered(completion_tokens, finishes)    # how far the answer has come, however it was left
    watch.failed(error)                            # an error of which the client learns by an event
"""

import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import ClientDisconnect

from app.ingress.errors import ApiError
from app.ingress.traces import NO_TRACER, Tracer
from deployments import instruments
from deployments.exposition import Family, expose
from migration.cursor import Cursor

log = logging.getLogger("ray.serve.mell.request")

CLIENT_CLOSED = "client_closed"
INTERNAL_ERROR = "internal_error"
CLIENT_CLOSED_STATUS = 499
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
"""As in vLLM's `vllm:time_to_first_token_seconds`."""
_ITL_S = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
"""As in vLLM's `vllm:inter_token_latency_seconds`, and two below."""


class Followed(Protocol):
    """What a watch wants to know of a conversation when its request has ended."""

    cursor: Cursor
    moves: int
    resubmissions: int


class Observed:
    """The requests of one ingress. `clock` tells seconds, `tracer` is told of every request.

    `decode` makes text of tokens; where it is given, prompts and answers are logged, too.
    """

    def __init__(
        self,
        model: str,
        decode: Callable[[Sequence[int]], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.model = model
        self.decode = decode
        self.clock = clock
        self.tracer = tracer
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("mell_requests", "Requests that ended.", ["endpoint", "outcome"], registry=registry)
        self.running = Gauge("mell_requests_running", "Requests that have not ended.", registry=registry)
        self.prompt_tokens = Counter(
            "mell_request_prompt_tokens", "Prompt tokens of ended requests that got a token.", registry=registry
        )
        self.completion_tokens = Counter(
            "mell_request_completion_tokens", "Output tokens of ended requests.", registry=registry
        )
        self.ttft = Histogram(
            "mell_request_ttft_seconds",
            "From a request's arrival until its first tokens are passed on.",
            buckets=_TTFT_S,
            registry=registry,
        )
        self.itl = Histogram(
            "mell_request_itl_seconds",
            "Between two steps of an answer as they are passed on.",
            buckets=_ITL_S,
            registry=registry,
        )
        self.lost = instruments.Counter(
            "mell_requests_lost", "Requests under way that could not be continued.", registry
        )

    def begin(self, endpoint: str) -> "Watch":
        """A request has arrived; it ends with the block that is entered with the watch."""
        return Watch(self, endpoint)

    def expose(self, replica: str) -> tuple[Family, ...]:
        """All metrics, as those of that replica of the ingress."""
        return expose(self._registry, {"replica": replica})


class Watch:
    """One request, from its arrival to its end. Until something else is known, its client has left it."""

    def __init__(self, observed: Observed, endpoint: str) -> None:
        self.key: str | None = None
        self.began = observed.clock()
        self.ttft_s: float | None = None
        self._observed = observed
        self._endpoint = endpoint
        self._id: str | None = None
        self._label: str | None = None
        self._prompts: Sequence[Sequence[int]] = ()
        self._conversations: list[Followed] = []
        self._completion_tokens = 0
        self._outcome, self._status = CLIENT_CLOSED, CLIENT_CLOSED_STATUS

    def accepted(self, id: str, label: str, prompts: Sequence[Sequence[int]]) -> None:
        """It is clear what is asked for; `prompts` are token ids, each prompt once."""
        self._id, self._label, self._prompts = id, label, prompts

    def choice(self, conversation: Followed) -> "Steps":
        """A choice of the answer runs."""
        self._conversations.append(conversation)
        return Steps(self._observed, self)

    def answered(self, completion_tokens: int, finishes: Sequence[str | None]) -> None:
        """So many tokens of the answer count; `finishes` has the finish reason of each choice, None if it has none.

        With all of them, the answer is complete.
        """
        self._completion_tokens = completion_tokens
        reasons = {reason for reason in finishes if reason is not None}
        if reasons and None not in finishes:
            self._outcome, self._status = "+".join(sorted(reasons)), 200

    def served(self) -> None:
        """It is answered, and no text was generated for it."""
        self._outcome, self._status = "ok", 200

    def failed(self, error: ApiError) -> None:
        """It ends with that error."""
        self._outcome = error.code or str(error.body()["error"]["type"])
        self._status = error.status

    def __enter__(self) -> Self:
        self._observed.running.inc()
        self._trace = self._observed.tracer.begin(self._endpoint)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        match error:
            case ApiError():
                self.failed(error)
            case ClientDisconnect() | OSError():
                pass  # Reading or writing says that the client left.
            case Exception():
                self._outcome, self._status = INTERNAL_ERROR, 500
        self._count()
        line = self._line()
        self._trace.end(line)
        log.info("request %s: %s", line["id"], line["outcome"], extra={"request": line})

    def _count(self) -> None:
        observed = self._observed
        observed.running.dec()
        observed.requests.labels(self._endpoint, self._outcome).inc()
        observed.completion_tokens.inc(self._completion_tokens)
        if self.ttft_s is not None:
            observed.prompt_tokens.inc(sum(map(len, self._prompts)))

    def _line(self) -> dict[str, Any]:
        line: dict[str, Any] = {
            "id": self._id,
            "label": self._label,
            "endpoint": self._endpoint,
            "key": self.key,
            "model": self._observed.model,
            "prompt_tokens": sum(map(len, self._prompts)),
            "completion_tokens": self._completion_tokens,
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
            "duration_s": round(self._observed.clock() - self.began, 6),
            "moves": sum(conversation.moves for conversation in self._conversations),
            "resubmissions": sum(conversation.resubmissions for conversation in self._conversations),
            "outcome": self._outcome,
            "status": self._status,
        }
        if (trace_id := self._trace.id) is not None:
            line["trace_id"] = trace_id
        if (decode := self._observed.decode) is not None:
            line["prompts"] = [decode(prompt) for prompt in self._prompts]
            line["texts"] = [decode(conversation.cursor.tokens) for conversation in self._conversations]
        return line


class Steps:
    """The steps of one choice. `step` is all that is done for every token: about 2 us."""

    def __init__(self, observed: Observed, watch: Watch) -> None:
        self._clock = observed.clock
        self._observe = observed.itl.observe
        self._first = observed.ttft.observe
        self._watch = watch
        self._last: float | None = None

    def step(self) -> None:
        """The tokens of one engine step are passed on now."""
        now = self._clock()
        if self._last is not None:
            self._observe(now - self._last)
        elif self._watch.ttft_s is None:
            self._watch.ttft_s = now - self._watch.began
            self._first(self._watch.ttft_s)
        self._last = now
