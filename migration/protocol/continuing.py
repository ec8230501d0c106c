"""The requests that engines run, made of the request that a client sent: the only place that edits one.

A request travels as vLLM's own message to an engine core. An engine gets this message with few members replaced, on the
first replica as on any later one; all others stay as the frontend has made them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from migration.protocol.core_messages import NIL, Adapter, CoreRequest, Frames, decode_request, encode_request
from migration.protocol.request import IngressId, RequestSpec, Trait
from policies.model import RequestId, Tokens
from policies.precedence import DEFAULT_PRECEDENCE, Precedence

NOTHING: Mapping[str, Any] = {}

_LIKELIEST = 4
"""The number of likeliest tokens whose logprobs come with the token of a probe."""

_OF_THE_PROMPT = ("prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids", "skip_reading_prefix_cache")
"""Sampling parameters that demand a computation of the whole prompt: its result came with the first token."""


def to_spec(
    request: CoreRequest,
    frames: Frames,
    id: RequestId,
    label: str,
    ingress: IngressId,
    precedence: Precedence = DEFAULT_PRECEDENCE,
    priority: int | None = None,
) -> RequestSpec:
    """A request as it comes from vLLM's frontend in `frames`, with the facts that decisions need.

    `priority` replaces the client's (None: it does not).

    Raises:
        ValueError: it has no prompt of token ids, or no bound on its output.
    """
    tokens, max_tokens = request.prompt_token_ids, request.max_tokens
    if not tokens or max_tokens is None:
        raise ValueError("the request has no prompt of tokens, or no max_tokens")
    return RequestSpec(
        id,
        label,
        ingress,
        frames,
        Tokens(len(tokens)),
        max_tokens,
        _traits(request),
        request.lora_request,
        precedence,
        request.priority if priority is None else priority,
    )


def _traits(request: CoreRequest) -> frozenset[Trait]:
    sampling = request.sampling
    facts = {
        Trait.SEEDED: sampling.get("seed") is not None and sampling.get("temperature", 1.0) > 0.0,
        Trait.STRUCTURED: sampling.get("structured_outputs") is not None,
        Trait.SCORED: sampling.get("logprobs") is not None,
        Trait.POOLED: request.pooled,
    }
    return frozenset(trait for trait, holds in facts.items() if holds)


def isolated(request: CoreRequest, tenant: str) -> CoreRequest:
    """The request, with cached KV that only requests of the same `tenant` and the client's own salt share."""
    # Names of tenants have no colon: two different pairs of names and salts give different texts.
    return msgspec.structs.replace(request, cache_salt=f"{tenant}:{request.cache_salt or ''}")


def apart(spec: RequestSpec, tenant: str) -> RequestSpec:
    """The request, as one of a `tenant` of its own: see `isolated`."""
    return replace(spec, body=encode_request(isolated(decode_request(spec.body), tenant), spec.body[1:]))


def plain_spec(
    id: str, prompt: tuple[int, ...], max_tokens: int, label: str = "", ingress: str = "", **sampling: Any
) -> RequestSpec:
    """A greedy request that no frontend has made, for measurements; `sampling` are further vLLM sampling parameters."""
    params = {"max_tokens": max_tokens, "temperature": 0.0, **sampling}
    request = CoreRequest(id, list(prompt), sampling_params=params)
    return to_spec(request, encode_request(request), RequestId(id), label, IngressId(ingress))


def probe(spec: RequestSpec, outputs: tuple[int, ...], end: int, reads_cache: bool) -> RequestSpec | None:
    """A greedy request for the token behind the first `end` tokens of a context and the one after these.

    Its blocks have the names of the request's own; without `reads_cache` it computes all of them. None if the context
    has more than tokens, or `end` is 0.
    """
    request = decode_request(spec.body)
    if not end or request.has_media or bytes(request.prompt_embeds) != bytes(NIL):
        return None
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": _LIKELIEST, "ignore_eos": True}
    if not reads_cache:
        sampling["skip_reading_prefix_cache"] = True
    made = CoreRequest(
        spec.id,
        request.context(outputs)[: end + 1],
        sampling_params=sampling,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
    )
    return to_spec(made, encode_request(made), spec.id, "", IngressId(""))


_OF_GRAMMARS = ("structured_outputs", "ignore_eos", "stop_token_ids", "_eos_token_id", "_all_stop_token_ids")
"""Sampling parameters on which a grammar depends."""


def rehearsing(spec: RequestSpec, name: str, outputs: tuple[int, ...]) -> Frames:
    """A request of one token that an engine runs only if it could continue the grammar of `spec` after `outputs`.

    The connector has the grammar accept the output (`migration.kv.history`). Nothing of the context is computed.
    """
    request = decode_request(spec.body)
    sampling = {parameter: request.sampling[parameter] for parameter in _OF_GRAMMARS if parameter in request.sampling}
    private = {"mell_context": request.context(outputs), "mell_output": len(outputs)}
    made = CoreRequest(
        name,
        request.context(())[:1],
        sampling_params={
            **sampling,
            "max_tokens": 1,
            "temperature": 0.0,
            "extra_args": {"kv_transfer_params": private},
        },
        priority=spec.priority,
        external_req_id=name,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
    )
    return encode_request(made)


def continued(
    spec: RequestSpec,
    name: str,
    key: str,
    outputs: tuple[int, ...],
    transfer: Mapping[str, Any] = NOTHING,
    adapter: Adapter | None = None,
) -> Frames:
    """The request that a replica's engine runs after `outputs`, under vLLM's request id `name` and Mell's `key`.

    The output stands at the end of the prompt, and the connector turns it into output again (`migration.kv.history`).
    vLLM then counts `max_tokens` and penalties from the first output token on. `transfer` are further parameters for
    the connector. `adapter` is the request's, as this engine has loaded it.
    """
    request = msgspec.structs.replace(decode_request(spec.body), priority=spec.priority)
    sampling = dict(request.sampling)
    if outputs:
        for parameter in _OF_THE_PROMPT:
            sampling.pop(parameter, None)
    if sampling.get("min_tokens", 0) <= len(outputs):
        sampling.pop("min_tokens", None)
    private = {"mell_key": key, "mell_output": len(outputs), **transfer}
    return _edited(spec, request, name, outputs, sampling, private, adapter)


def loading(
    spec: RequestSpec,
    name: str,
    outputs: tuple[int, ...],
    wanted: dict[str, Any],
    last_token: int,
    transfer: Mapping[str, Any] = NOTHING,
    adapter: Adapter | None = None,
) -> Frames:
    """A request that waits for the KV blocks `wanted` of the context's first `last_token` tokens.

    What distinguishes blocks of equal tokens in the prefix cache (adapter, salt, media) is that of the request. A
    prompt with media stays whole: models take for granted that no image ends behind it. `adapter` is as in `continued`.
    """
    return _waiting(spec, name, outputs, {"mell_load": wanted, **transfer}, last_token, adapter)


def holding(
    spec: RequestSpec,
    name: str,
    outputs: tuple[int, ...],
    last_token: int,
    transfer: Mapping[str, Any] = NOTHING,
    adapter: Adapter | None = None,
) -> Frames:
    """A request that holds the cached KV blocks of the context's first `last_token` tokens, without the last token.

    The rest is as in `loading`.
    """
    return _waiting(spec, name, outputs, {"mell_hold": name, **transfer}, last_token, adapter)


def _waiting(
    spec: RequestSpec,
    name: str,
    outputs: tuple[int, ...],
    private: dict[str, Any],
    last_token: int,
    adapter: Adapter | None,
) -> Frames:
    """A request that is never to run."""
    request = decode_request(spec.body)
    if request.has_media:
        last_token = max(last_token, spec.prompt_tokens)
    edited = msgspec.structs.replace(request, priority=0)
    sampling = {"max_tokens": 1, "temperature": 0.0}
    return _edited(spec, edited, name, outputs, sampling, private, adapter, last_token)


def _edited(
    spec: RequestSpec,
    request: CoreRequest,
    name: str,
    outputs: tuple[int, ...],
    sampling: dict[str, Any],
    private: dict[str, Any],
    adapter: Adapter | None,
    last_token: int | None = None,
) -> Frames:
    """`extra_args` is made anew: a client must name neither a file nor a slot to the connector.

    A pooled request has none: it runs in an engine without connector.
    """
    assert request.prompt_token_ids is not None
    extra_args = {"kv_transfer_params": private}
    edited = msgspec.structs.replace(
        request,
        request_id=name,
        external_req_id=name,
        prompt_token_ids=request.context(outputs)[:last_token],
        sampling_params=None if request.pooled else {**sampling, "extra_args": extra_args},
        client_index=0,
        current_wave=0,
        lora_request=adapter,
        data_parallel_rank=None,
        session_id=None,
        kv_hints=NIL,
        abort_immediately=False,
    )
    return encode_request(edited, spec.body[1:])
