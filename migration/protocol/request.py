"""A request as every replica understands it: tokens and sampling, no text.

Any replica that holds a `RequestSpec` and the output tokens so far can continue the request; that is
what makes resending tokens, moving KV and surviving a crash one mechanism.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType

from policies.model import RequestId

IngressId = NewType("IngressId", str)


Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Structured:
    """The form of the output, as in vLLM's structured outputs.

    `value` is a JSON schema, a regular expression, a JSON list of texts, a grammar in EBNF or a structural tag in JSON;
    empty for "json_object".
    """

    kind: Kind
    value: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, when generation ends, and whose turn it is. Stop strings are the ingress's business.

    `max_tokens` and `min_tokens` count from the first output token on, wherever it was drawn. `logit_bias` holds pairs
    of token id and bias. Before there are `min_tokens`, neither the model's end nor one of `stop_token_ids` is drawn.
    `logprobs` is the number of likeliest tokens that come with the logprob of each token; None: no logprobs.
    In an engine that goes by `priority`, lower ones come first.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    structured: Structured | None = None
    priority: int = 0

    @property
    def seeded(self) -> bool:
        """True if tokens are drawn at random, and the same ones each time."""
        return self.seed is not None and self.temperature > 0.0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The constant part of a request. `id` is ours; `label` is what the client called it."""

    id: RequestId
    label: str
    prompt: tuple[int, ...]
    sampling: Sampling
    ingress: IngressId


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens [index, index + len(tokens)) of a request, emitted under `hop`.

    `finish` is OpenAI's finish reason on the last delta: "stop" or "length". `logprobs` has one entry per token, packed
    (see `migration.protocol.request`), if the request asks for them, else none.
    """

    request: RequestId
    hop: int
    index: int
    tokens: tuple[int, ...]
    finish: str | None = None
    logprobs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Moving:
    """The host is about to hand the request to `target`, which will emit under `next_hop`."""

    request: RequestId
    hop: int
    next_hop: int
    target: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The host's last event under `hop`: tokens from `index` on come from `target` under `next_hop`."""

    request: RequestId
    hop: int
    next_hop: int
    index: int
    target: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """The host has sent the request to a target under `next_hop` and got no answer: which of the two goes on?

    The host publishes nothing more under `hop` until the reader has answered.
    """

    request: RequestId
    hop: int
    next_hop: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The host cannot go on with the request; whoever reads it may continue it elsewhere.

    Unless it is `invalid`: then no engine takes it.
    """

    request: RequestId
    hop: int
    reason: str
    invalid: bool = False


StreamEvent = Delta | Moving | Moved | Doubt | Lost


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a token's probability; `top` are pairs of token id and logprob, the likeliest first.

    It crosses processes with every token, and both ends keep it while a stream may still break: so it travels packed,
    in 4 + 8 k bytes for k likeliest tokens, where the same in Python objects takes some hundred bytes per pair. Engines
    compute logprobs in float32 (vLLM: v1/sample/sampler.py, `compute_logprobs`), so nothing is lost.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def pack_logprobs(logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float]) -> bytes:
    """Logprobs of one token, as they travel. Raises struct.error unless the likeliest have a logprob each."""
    count = len(top_ids)
    return struct.pack(f"<f{count}i{count}f", logprob, *top_ids, *top_logprobs)


def unpack_logprobs(packed: bytes) -> TokenLogprobs:
    """The inverse of `pack_logprobs`."""
    count = len(packed) // 8
    logprob, *pairs = struct.unpack(f"<f{count}i{count}f", packed)
    return TokenLogprobs(logprob, tuple(zip(pairs[:count], pairs[count:], strict=True)))
