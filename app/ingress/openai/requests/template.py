"""Chat templates: the Jinja text that makes one prompt of the messages of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import jinja2

from app.ingress.errors import ApiError

Message = Mapping[str, Any]
"""`role` and `content`, and `name`, `tool_call_id` and `tool_calls` where the client gave them."""
Tool = Mapping[str, Any]
"""`type` and `function`, as the client gave them."""


class ChatTemplate:
    """A chat template, rendered by the model's tokenizer (transformers' sandboxed Jinja); another one with tools."""

    def __init__(self, tokenizer: Any, source: str, source_with_tools: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._source_with_tools = source_with_tools or source

    @classmethod
    def of(cls, tokenizer: Any, configured: str | None = None) -> Self | None:
        """The configured template, else the tokenizer's own; None without either.

        Of several, they are its `default` and, with tools, its `tool_use`.

        Raises:
            ValueError: the configured one is not Jinja.
        """
        own: Any = tokenizer.chat_template
        own_with_tools = None
        if isinstance(own, Mapping):
            own, own_with_tools = own.get("default"), own.get("tool_use")
        source = configured or own
        template = cls(tokenizer, source, None if configured else own_with_tools) if source else None
        if template is not None and configured:
            template._check()
        return template

    def _check(self) -> None:
        try:
            self._render([{"role": "user", "content": "x"}], None, add_generation_prompt=True)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"model_loading_config.chat_template: line {error.lineno}: {error.message}") from error
        except jinja2.TemplateError:
            # It may want other messages.
            pass

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The prompt, special tokens included. Raises ApiError 400 for messages that the template refuses."""
        try:
            return self._render(messages, tools, add_generation_prompt)
        except jinja2.TemplateSyntaxError:
            raise
        except jinja2.TemplateError as error:
            raise ApiError(
                400, f"messages: the chat template says: {error}", param="messages", code="invalid_value"
            ) from None

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] | None, add_generation_prompt: bool) -> str:
        source = self._source_with_tools if tools else self._source
        if '"developer"' not in source and "'developer'" not in source:
            # As in vLLM: to such a template the newer name means nothing.
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        prompt: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return prompt
