"""Server-sent events as OpenAI's API streams them: one JSON object per event, then `[DONE]`; pure."""

import json
from collections.abc import Iterator
from typing import Any

from app.client.errors import BadAnswer

Event = dict[str, Any]

_DATA = b"data:"
_DONE = b"[DONE]"


class EventDecoder:
    """Turns the bytes of a stream into its events; `done` is True once `[DONE]` has arrived.

    Lines end at line feeds only. `str.splitlines` (and httpx's `aiter_lines`, which uses it) also splits at U+0085
    and U+2028, which JSON leaves unescaped and a model may generate.
    """

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that `data` completes; comments and fields other than `data` are skipped.

        Raises:
            BadAnswer: an event that is not a JSON object.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            payload = line.removeprefix(_DATA).strip()
            if payload == _DONE:
                self.done = True
            else:
                yield _parse(payload)

    def end(self) -> None:
        """The stream has ended.

        Raises:
            BadAnswer: before `[DONE]`.
        """
        if not self.done:
            raise BadAnswer("no [DONE]", "the stream ended without [DONE]")


def _parse(payload: bytes) -> Event:
    try:
        event = json.loads(payload)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise BadAnswer("malformed event", payload[:200].decode(errors="replace"))
    return event
