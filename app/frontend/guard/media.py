"""Images, audio and video in requests: where they may come from, and how many are prepared at once.

vLLM fetches addresses from where it runs, inside the operator's network, so an address that a client chooses is a
forged request of the server. Data that a request brings along (`data:`) is not fetched. A decoded item can be as large
as a thousand requests.
"""

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from app.ingress.errors import ApiError

NO_DOMAIN = "media.invalid"
"""A domain that no host has (RFC 2606). To vLLM, a list of allowed domains without any member allows all."""

MAX_FETCHED_MIB = 32
"""The largest item that is fetched from an address."""

MEDIA_CHARGE_TOKENS = 256
"""Provisional charge for one item, about that of an image of 450 x 450 pixels."""

MAX_DATA_HEAD = 256
_DATA = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
"""The beginning of data that vLLM decodes."""

_AMBIGUOUS = re.compile(r"[\\\s\x00-\x1f]")
"""Characters that parsers of addresses disagree on: another host could be fetched than was checked."""

_ADDRESSES = {"image_url", "audio_url", "video_url", "file_url", "url"}
"""Members that hold an address, or an object with it."""
VIDEO_ITEMS = 32
"""A video counts as this many items: vLLM decodes as many frames of it, unless it is set to others."""

_ITEMS: Mapping[str, int] = {
    **dict.fromkeys(("image_url", "audio_url", "input_audio", "source", "image_pil"), 1),
    **dict.fromkeys(("image_embeds", "audio_embeds", "video_embeds"), 1),
    "video_url": VIDEO_ITEMS,
}
"""Members that make an object media, and the number of items that they count as."""
_NOT_CONTENT = {
    *("tools", "tool_calls", "tool_choice", "functions", "response_format", "structured_outputs", "text"),
    *("chat_template_kwargs", "metadata", "documents", "arguments", "logit_bias"),
}
"""Members that vLLM never looks for media in; what the client's own schemas and arguments name is theirs."""

_MARKS = (b'url"', b"image", b"audio", b"video", b'"source"')
"""A body with an item of media has one of these."""


class MediaUse:
    """The media of one body: the number of items, and the characters of their addresses and data.

    `named`: the client had given them names, which are dropped.
    """

    def __init__(self) -> None:
        self.items = 0
        self.characters = 0
        self.named = False


def check_media(
    body: dict[str, Any], encoded: bytes, domains: Collection[str], max_items: int, pooling: bool = False
) -> MediaUse:
    """Refuse too many items, and addresses except of `domains`; drop the names that the client gave to items.

    vLLM takes equal names (`uuid`) for equal items, whosever they are: one client would see, or replace, another's.
    `encoded` is the body as JSON. `pooling`: documents are content, too.

    Raises:
        ApiError: 400.
    """
    use = MediaUse()
    if not any(mark in encoded for mark in _MARKS):
        return use
    for part in _parts(body, _NOT_CONTENT - {"documents"} if pooling else _NOT_CONTENT):
        use.items += sum(_ITEMS[name] for name in _ITEMS.keys() & part.keys()) + _count_images(part)
        use.named |= _drop_name(part)
        for name, address in _addresses(part):
            if not _allowed(address, domains):
                message = f"{name}: only data: addresses with base64" + (
                    f" and those of {', '.join(sorted(domains))} are allowed" if domains else " are allowed"
                )
                raise ApiError(400, message, param=name, code="media_not_allowed")
            use.characters += len(address)
        data = part.get("data")
        use.characters += len(data) if isinstance(data, str) else 0
    if use.items > max_items:
        message = f"{use.items} images and audio clips, and the limit is {max_items}; a video counts as {VIDEO_ITEMS}"
        raise ApiError(400, message, code="too_many_media")
    return use


def _parts(body: dict[str, Any], skipped: Collection[str]) -> Iterator[dict[str, Any]]:
    """The objects of a body's content."""
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(each for each in value if isinstance(each, dict | list))
            continue
        yield value
        call = value.get("type") == "tool_use"
        pending.extend(
            member
            for name, member in value.items()
            if isinstance(member, dict | list) and name not in skipped and not (call and name == "input")
        )


def _count_images(part: dict[str, Any]) -> int:
    images = part.get("images")
    return len(images) if isinstance(images, list) else 0


def _addresses(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The addresses in an object, each with its member."""
    for name, member in part.items():
        if name in _ADDRESSES and isinstance(member, str):
            yield name, member
        elif name == "images" and isinstance(member, list):
            yield from ((name, each) for each in member if isinstance(each, str))


def _drop_name(part: dict[str, Any]) -> bool:
    """Drop the client's name of an item; True if it had one. Raises ApiError 400 for a name without an item."""
    items = _ITEMS.keys() & part.keys()
    if not items or part.pop("uuid", None) is None:
        return False
    if all(not part[name] for name in items):
        raise ApiError(400, "uuid: an item must come with the request", param="uuid", code="media_not_allowed")
    return True


def _allowed(address: str, domains: Collection[str]) -> bool:
    if address[:5].lower() == "data:":
        return _DATA.match(address[:MAX_DATA_HEAD]) is not None
    if _AMBIGUOUS.search(address):
        return False
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and "@" not in parts.netloc and parts.hostname in domains
    except ValueError:
        return False


class MediaGate:
    """Bounds the items that are decoded and processed at once; the others wait, first come, first served.

    Decoded items are in memory until vLLM's processor has made the request of them.
    """

    def __init__(self, items: int) -> None:
        self._free = asyncio.Semaphore(items)
        self._turn = asyncio.Lock()

    async def enter(self, items: int) -> "MediaHold":
        """Wait until there is room for `items`, which may not be more than there is in all."""
        hold = MediaHold(self._free)
        if not items:
            return hold
        try:
            async with self._turn:
                for _ in range(items):
                    await self._free.acquire()
                    hold.items += 1
        except BaseException:
            hold.release()
            raise
        return hold


class MediaHold:
    """The room of one request in a `MediaGate`, until it is released."""

    def __init__(self, room: asyncio.Semaphore) -> None:
        self.items = 0
        self._room = room

    def release(self) -> None:
        """Give the room back. Further calls do nothing."""
        for _ in range(self.items):
            self._room.release()
        self.items = 0
