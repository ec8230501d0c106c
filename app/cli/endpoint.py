"""The operator's calls of a command: documents as values, and failures with a remedy."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeVar

from app.cli.errors import Failed, NotThere
from app.client.api import CACHE, COPY, MATCH, MIGRATIONS, PIN, STATE, ApiClient, is_loopback
from app.client.documents import (
    BlocksDocument,
    CopyDocument,
    MatchDocument,
    Records,
    StateDocument,
    parse_blocks,
    parse_copy,
    parse_match,
    parse_records,
    parse_state,
)
from app.client.errors import BadAnswer, ClientError, ErrorAnswer, NoAnswer, NobodyListens

Answer = TypeVar("Answer")
Value = TypeVar("Value")

TIMEOUT_S, CONNECT_S = 12.0, 3.0
"""Longer than the ingress's own waits for the scheduler and for replicas."""

_KEY_HINT = "give --admin-key KEY, or set MELL_ADMIN_KEY, to the ingress.admin_key of the settings"


class MellEndpoint:
    """A running Mell. Every call raises `NotThere` without an answer of Mell's, and `Failed` for an error answer."""

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        # A proxy cannot reach this machine's loopback.
        proxies = not is_loopback(url)
        self._mell = ApiClient(url, admin_key, timeout_s=TIMEOUT_S, connect_s=CONNECT_S, proxies=proxies)
        self._loop = asyncio.Runner()
        self.url = self._mell.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.run(self._mell.aclose())
        self._loop.close()

    def state_document(self) -> dict[str, Any]:
        """The document at `/mell/state`, checked to be a valid state."""
        document = self._wait(self._mell.state())
        self._read(STATE, document, parse_state)
        return document

    def state(self) -> StateDocument:
        """`/mell/state` as a value."""
        return self._read(STATE, self._wait(self._mell.state()), parse_state)

    def migrations(self) -> Records:
        """The records at `/mell/migrations`, newest first."""
        return self._read(MIGRATIONS, self._wait(self._mell.migrations()), parse_records)

    def move(self, request: str, target: str | None, path: str) -> str:
        """Order a move; the id of the migration."""
        return self._wait(self._mell.move(request, path, target), ordered=True)

    def drain(self, replica: str) -> dict[str, Any]:
        """Order a drain; the answer."""
        return self._wait(self._mell.drain(replica), ordered=True)

    def drain_node(self, node: str, within_s: float | None) -> dict[str, Any]:
        """Order a drain of nodes; the answer."""
        return self._wait(self._mell.drain_node(node, within_s), ordered=True)

    def hand_over(self) -> dict[str, Any]:
        """`/mell/hand-over`."""
        return self._wait(self._mell.hand_over())

    def begin_hand_over(self, to: str, key: str | None) -> dict[str, Any]:
        """Hand all requests over to the Mell at `to`; the answer."""
        return self._wait(self._mell.begin_hand_over(to, key), ordered=True)

    def undo_hand_over(self) -> dict[str, Any]:
        """Hand no more requests over; the answer."""
        return self._wait(self._mell.undo_hand_over(), ordered=True)

    def set_role(self, replica: str, role: str | None) -> dict[str, Any]:
        """Set a replica's role; the answer."""
        return self._wait(self._mell.set_role(replica, role), ordered=True)

    def set_memory(self, replica: str, blocks: int | None) -> dict[str, Any]:
        """Set the size of a replica's KV pool; the answer."""
        return self._wait(self._mell.set_memory(replica, blocks), ordered=True)

    def set_asleep(self, kind: str, name: str, asleep: bool) -> dict[str, Any]:
        """Have a replica or a model fall asleep or wake; the answer."""
        return self._wait(self._mell.set_asleep(kind, name, asleep), ordered=True)

    def pair(self, lower: str, upper: str) -> dict[str, Any]:
        """Form a pair of two replicas; the answer."""
        return self._wait(self._mell.pair(lower, upper), ordered=True)

    def unpair(self, replica: str) -> dict[str, Any]:
        """Undo the pair of a replica; the answer."""
        return self._wait(self._mell.unpair(replica), ordered=True)

    def mode(self) -> dict[str, Any]:
        """`/mell/mode`."""
        return self._wait(self._mell.mode())

    def set_mode(self, mode: str) -> dict[str, Any]:
        """Set the scheduler's mode; the answer."""
        return self._wait(self._mell.set_mode(mode), ordered=True)

    def set_bounds(self, least: int, most: int, model: str | None) -> dict[str, Any]:
        """Set the bounds on the number of a model's replicas; the answer."""
        return self._wait(self._mell.set_bounds(least, most, model), ordered=True)

    def set_level(
        self, service_class: str, ttft_p99_s: float | None, itl_p99_ms: float | None, model: str | None
    ) -> dict[str, Any]:
        """Set the service level of a class for a model; the answer."""
        return self._wait(self._mell.set_level(service_class, ttft_p99_s, itl_p99_ms, model), ordered=True)

    def match(self, prompt: Mapping[str, Any]) -> tuple[MatchDocument, dict[str, Any]]:
        """`/mell/cache/match` for a body of it, as a value and as the document."""
        document = self._wait(self._mell.match(prompt), ordered=True)
        return self._read(MATCH, document, parse_match), document

    def copy(self, order: Mapping[str, Any]) -> tuple[CopyDocument, dict[str, Any]]:
        """Copy cached blocks to another replica; the answer as a value and as the document."""
        document = self._wait(self._mell.copy(order), ordered=True)
        return self._read(COPY, document, parse_copy), document

    def pin(self, order: Mapping[str, Any]) -> tuple[BlocksDocument, dict[str, Any]]:
        """Keep blocks in host memory; the answer as a value and as the document."""
        document = self._wait(self._mell.pin(order), ordered=True)
        return self._read(PIN, document, parse_blocks), document

    def drop(self, order: Mapping[str, Any]) -> tuple[BlocksDocument, dict[str, Any]]:
        """Delete blocks from prefix caches; the answer as a value and as the document."""
        document = self._wait(self._mell.drop(order), ordered=True)
        return self._read(CACHE, document, parse_blocks), document

    def health(self) -> str | None:
        """The reason why requests cannot be served now, None if they can. Raises NotThere only without an answer."""
        try:
            self._loop.run(self._mell.health())
        except ErrorAnswer as error:
            return error.message
        except NoAnswer as error:
            raise self._not_there(error) from None
        return None

    def _wait(self, call: Coroutine[Any, Any, Answer], ordered: bool = False) -> Answer:
        """Make a call. A 404 to an order concerns its request, replica or model, any other one another server."""
        try:
            return self._loop.run(call)
        except ErrorAnswer as error:
            raise self._failure(error, ordered) from None
        except (NoAnswer, BadAnswer) as error:
            raise self._not_there(error) from None

    def _failure(self, error: ErrorAnswer, ordered: bool) -> Failed | NotThere:
        match error.status:
            case HTTPStatus.NOT_FOUND if not ordered:
                return NotThere(f"{self.url} answers, but is not Mell: HTTP 404, {error.message}")
            case HTTPStatus.BAD_GATEWAY | HTTPStatus.GATEWAY_TIMEOUT:
                return NotThere(f"a proxy at {self.url} cannot reach Mell: {error.message}")
            case HTTPStatus.UNAUTHORIZED:
                return Failed(f"{error.message}\n{_KEY_HINT}", error.document)
            case _:
                return Failed(error.message, error.document)

    def _not_there(self, error: ClientError) -> NotThere:
        match error:
            case NobodyListens():
                return NotThere(
                    f"nothing listens at {self.url} ({error}); is Mell running there? "
                    "--url or MELL_URL names another address"
                )
            case BadAnswer():
                return NotThere(f"{self.url} answers, but not as Mell does: {error}")
            case _:
                return NotThere(f"{self.url} does not answer: {error}")

    def _read(self, path: str, document: Any, parse: Callable[[Any], Value]) -> Value:
        try:
            return parse(document)
        except (KeyError, TypeError, ValueError) as error:
            raise NotThere(f"{self.url} answers, but not as Mell does: {path} is not valid, {error!r}") from None
