"""A prompt, and the sampling of its answers, as the API understands them."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `echo` is the text that its answers begin with."""

    tokens: tuple[int, ...]
    echo: str = ""


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
    """vLLM's sampling parameters, as far as the API offers them, and the priority. Stop strings are not among them.

    `logit_bias` holds pairs of token id and bias. `logprobs` is the number of likeliest tokens that come with the
    logprob of each token; None: no logprobs.
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
