"""A request as every replica understands it: no text, and a body that only engines read.

Any replica that holds a `RequestSpec` and the output tokens so far can continue the request; that is
what makes resending tokens, moving KV and surviving a crash one mechanism.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import msgspec

from migration.protocol.core_messages import Adapter
from policies.model import AdapterId, ReplicaId, RequestId, Tokens
from policies.precedence import DEFAULT_PRECEDENCE, Precedence

IngressId = NewType("IngressId", str)


class Trait(StrEnum):
    """A property of a request that decides whether, and from where, it can be continued."""

    SEEDED = "seeded"
    """Tokens are drawn at random, and the same ones each time."""
    STRUCTURED = "structured"
    """The output has to follow a grammar."""
    SCORED = "scored"
    """Every token comes with logprobs."""
    POOLED = "pooled"
    """The output is no text but a vector or a score, whole at the end of the prompt."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The constant part of a request. `id` is ours; `label` is what the client called it.

    `body` is the request itself, which only engines read: vLLM's encoded `EngineCoreRequest`. `prompt_tokens` and
    `max_tokens` are lengths in tokens; a pooled request has no output tokens. An engine has `adapter` loaded before it
    runs the request. `precedence` decides about its turn where requests wait, and so does `priority` in an engine that
    schedules by it: the lowest comes first. At its end, its context is copied to `returns_to`, unless it ends there.
    """

    id: RequestId
    label: str
    ingress: IngressId
    body: tuple[bytes, ...] = field(repr=False)
    prompt_tokens: Tokens
    max_tokens: int
    traits: frozenset[Trait] = frozenset()
    adapter: Adapter | None = None
    precedence: Precedence = DEFAULT_PRECEDENCE
    priority: int = 0
    returns_to: ReplicaId | None = None

    @property
    def adapter_id(self) -> AdapterId | None:
        """The number of the adapter, for policies."""
        return None if self.adapter is None else AdapterId(self.adapter.lora_int_id)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A replica's model: its fingerprint (`Fingerprint.model`), and the traits of requests that it cannot continue."""

    model: str
    tied: frozenset[Trait]


Extras = tuple[tuple[int, bytes], ...]
"""The yield of engine steps beside tokens, such as logprobs: pairs of the index of a step's first token, and a rest.

The rest is vLLM's `EngineCoreOutput` without request id and tokens, encoded; a step of tokens alone has no pair. Steps
are never split: a reader that has the first token of one has all of it.
"""


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Made and encoded for every token of every request: a dataclass takes ten times the time."""


class Delta(_Event, frozen=True):
    """Output tokens [index, index + len(tokens)) of a request, emitted under `hop`.

    `finish` is vLLM's finish reason on the last delta.
    """

    request: RequestId
    hop: int
    index: int
    tokens: tuple[int, ...]
    finish: str | None = None
    extras: Extras = ()


class Moving(_Event, frozen=True):
    """The host is about to hand the request to `target`, which will emit under `next_hop`."""

    request: RequestId
    hop: int
    next_hop: int
    target: str


class Moved(_Event, frozen=True):
    """The host's last event under `hop`: tokens from `index` on come from `target` under `next_hop`."""

    request: RequestId
    hop: int
    next_hop: int
    index: int
    target: str


class Doubt(_Event, frozen=True):
    """The host has sent the request to a target under `next_hop` and got no answer: which of the two goes on?

    The host publishes nothing more under `hop` until the reader has answered.
    """

    request: RequestId
    hop: int
    next_hop: int


class Lost(_Event, frozen=True):
    """The host cannot go on with the request; whoever reads it may continue it elsewhere.

    Unless it is `invalid`: then no engine takes it. `died`: the host's engine has ended with the request on board.
    """

    request: RequestId
    hop: int
    reason: str
    invalid: bool = False
    died: bool = False


StreamEvent = Delta | Moving | Moved | Doubt | Lost
