"""vLLM's parsers of calls, of which each knows the manner of some models (hermes, llama3_json, mistral, ...).

vLLM is imported with the first parser, and only then: it takes seconds and a hundred MiB.
"""

import json
import logging
from typing import Any, Literal, Self

from app.ingress.errors import ApiError
from app.ingress.openai.answers.calls import Call, Calling, Said
from app.ingress.openai.requests.schema import ChatRequest
from app.ingress.openai.requests.tools import NamedTool
from app.ingress.openai.sampling import Structured

log = logging.getLogger("ray.serve")

_Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
_KINDS: tuple[_Kind, ...] = ("json", "regex", "choice", "grammar", "structural_tag")


class ToolParser:
    """A parser by its name in vLLM. `kind` makes one of vLLM's (vllm/parser) for each answer."""

    def __init__(self, kind: Any, tokenizer: Any) -> None:
        self._kind = kind
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, name: str, tokenizer: Any) -> Self:
        """The parser of that name, for the model's tokenizer (of transformers).

        Raises:
            ValueError: vLLM has none of that name, or it cannot work with the tokenizer.
        """
        from vllm.parser import ParserManager

        try:
            kind = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer)
        except TypeError as error:
            raise ValueError(f"model_loading_config.tool_call_parser is {name!r}: {error.__cause__ or error}") from None
        return cls(kind, tokenizer)

    def __call__(self, request: ChatRequest) -> Calling:
        """How calls come about in the answers to a request. Raises ApiError 400 when its tools do not suit vLLM."""
        from vllm.exceptions import VLLMClientError

        try:
            asked = self._parser(wanted := _as_vllms(request)).adjust_request(wanted)
        except (ValueError, VLLMClientError) as error:
            raise ApiError(400, f"tools: {error}", param="tools", code="invalid_value") from None
        return Calling(
            lambda prompt: ParserReading(self._parser(asked), asked, prompt),
            _structured(asked) or request.structured,
            # As in vLLM: whoever names the function knows that it is called.
            "stop" if isinstance(request.tool_use, NamedTool) else "tool_calls",
            request.calls_in_parallel,
            special_tokens=not asked.skip_special_tokens,
        )

    def _parser(self, asked: Any) -> Any:
        return self._kind(self._tokenizer, asked.tools)


class ParserReading:
    """A reading by a parser of vLLM, which keeps the state of one answer."""

    def __init__(self, parser: Any, asked: Any, prompt: tuple[int, ...]) -> None:
        self._parser = parser
        self._asked = asked
        self._prompt = list(prompt)

    def part(self, text: str, tokens: tuple[int, ...], over: bool) -> Said:
        """See `Reading.part`."""
        try:
            delta = self._parser.parse_delta(text, list(tokens), self._asked, self._prompt, finished=over)
        except Exception as error:
            raise _unreadable(error) from error
        if delta is None:
            return Said()
        return Said(delta.content or "", tuple(_part(call) for call in delta.tool_calls))

    def whole(self, text: str, tokens: tuple[int, ...]) -> Said:
        """See `Reading.whole`."""
        self._parser.set_prompt_token_ids(self._prompt)
        try:
            _, content, calls = self._parser.parse(
                text, self._asked, enable_auto_tools=True, model_output_token_ids=list(tokens)
            )
        except Exception as error:
            raise _unreadable(error) from error
        return Said(content or "", tuple(_call(index, call) for index, call in enumerate(calls or ())))


def _as_vllms(request: ChatRequest) -> Any:
    """What vLLM's own server would have made of the body, as far as parsers look at it."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    fields = {"tools", "parallel_tool_calls", "response_format", "structured_outputs"}
    body = request.model_dump(include=fields, by_alias=True, exclude_none=True)
    body["tool_choice"] = request.tool_use if isinstance(request.tool_use, str) else request.tool_use.model_dump()
    body["messages"] = [message.model_dump(exclude_none=True) for message in request.messages]
    return ChatCompletionRequest.model_validate(body)


def _structured(asked: Any) -> Structured | None:
    """What a request of vLLM's demands of its answer, if it is not by the `response_format`."""
    if (outputs := asked.structured_outputs) is None:
        return None
    for kind in _KINDS:
        if (value := getattr(outputs, kind)) is not None:
            return Structured(kind, value if isinstance(value, str) else json.dumps(value))
    return Structured("json_object") if outputs.json_object else None


def _part(call: Any) -> Call:
    function = call.function
    return Call(call.index, function.arguments or "", call.id, function.name) if function else Call(call.index)


def _call(index: int, call: Any) -> Call:
    from vllm.renderers.chat_utils import make_tool_call_id

    return Call(index, call.arguments, call.id or make_tool_call_id(), call.name)


def _unreadable(error: Exception) -> ApiError:
    log.error("vLLM's parser of calls failed", exc_info=error)
    return ApiError(500, "vLLM's parser of calls failed with this answer", code="tool_parser_failed")
