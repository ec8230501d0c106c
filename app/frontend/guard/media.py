"""Addresses of images, audio and video in requests.

vLLM fetches them from where it runs, inside the operator's network, so an address that a client chooses is a forged
request of the server. Data that a request brings along (`data:`) is not fetched.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

from app.ingress.errors import ApiError

NO_DOMAIN = "media.invalid"
"""A domain that no host has (RFC 2606). To vLLM, a list of allowed domains without any member allows all."""

_AMBIGUOUS = re.compile(r"[\\\s\x00-\x1f]")
"""Characters that parsers of addresses disagree on: another host could be fetched than was checked."""

_ADDRESSES = {"image_url", "audio_url", "video_url", "file_url", "url"}
"""Members that hold an address, or an object with it."""
_NOT_CONTENT = {
    *("tools", "tool_calls", "tool_choice", "functions", "response_format", "structured_outputs", "text"),
    *("chat_template_kwargs", "metadata", "documents", "arguments", "logit_bias"),
}
"""Members that vLLM never looks for media in; what the client's own schemas and arguments name is theirs."""


def check_media(body: dict[str, Any], domains: Collection[str], pooling: bool = False) -> None:
    """Refuse addresses in the parts of a request's content, except of `domains`.

    `pooling`: documents are content, too.

    Raises:
        ApiError: 400 for an address that is not allowed.
    """
    for name, address in _addresses(body, _NOT_CONTENT - {"documents"} if pooling else _NOT_CONTENT):
        if not _allowed(address, domains):
            message = f"{name}: only data: addresses" + (
                f" and those of {', '.join(sorted(domains))} are allowed" if domains else " are allowed"
            )
            raise ApiError(400, message, param=name, code="media_not_allowed")


def _addresses(body: dict[str, Any], skipped: Collection[str]) -> Iterator[tuple[str, str]]:
    """The addresses in a body, each with its member."""
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(each for each in value if isinstance(each, dict | list))
            continue
        tool_use = value.get("type") == "tool_use"
        for name, member in value.items():
            if name in skipped or (tool_use and name == "input"):
                continue
            if isinstance(member, dict | list):
                pending.append(member)
                if name == "images":
                    yield from ((name, each) for each in member if isinstance(each, str))
            elif isinstance(member, str) and name in _ADDRESSES:
                yield name, member


def _allowed(address: str, domains: Collection[str]) -> bool:
    if address[:5].lower() == "data:":
        return True
    if _AMBIGUOUS.search(address):
        return False
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and "@" not in parts.netloc and parts.hostname in domains
    except ValueError:
        return False
