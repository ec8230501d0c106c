"""The client: one server, its OpenAI completions and its operator's calls."""

import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx

from app.client.errors import BadAnswer, ErrorAnswer, NoAnswer, NobodyListens
from app.client.sse import Event, EventDecoder

STATE = "/mell/state"
MIGRATIONS = "/mell/migrations"
MODE = "/mell/mode"
CACHE = "/mell/cache"
MATCH = "/mell/cache/match"
COPY = "/mell/cache/copy"
PIN = "/mell/cache/pin"
HAND_OVER = "/mell/hand-over"
HAND_OVER_REQUESTS = "/mell/hand-over/requests"
COMPLETIONS = "/v1/completions"

KEEPALIVE_S = 2.0
"""Below uvicorn's 5 s: a connection that the server is about to close must not be used again."""

Read = TypeVar("Read")


def check_url(url: str) -> httpx.URL:
    """The parsed address of a server. Raises ValueError unless it has a host and the scheme http or https."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url} is not a URL: it is missing an 'http://' or 'https://' protocol, or a host")
    return parsed


def is_loopback(url: str) -> bool:
    """True if a URL names this machine itself."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ApiClient:
    """Calls one server over any number of connections; nothing is sent twice.

    Every call raises `NoAnswer`, `ErrorAnswer` or `BadAnswer`. Time-outs are seconds without a byte: `timeout_s` within
    a call, `connect_s` for a connection, `silence_s` within a stream (None: unbounded). Proxies of the environment are
    used only with `proxies`. `transport` replaces the network, in tests. Raises ValueError for a bad `url`.
    """

    def __init__(
        self,
        url: str,
        admin_key: str | None = None,
        *,
        timeout_s: float = 30.0,
        connect_s: float = 10.0,
        silence_s: float | None = None,
        proxies: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {admin_key}"} if admin_key else {})
        self.url = url.rstrip("/")
        self._stream_timeout = httpx.Timeout(timeout_s, connect=connect_s, read=silence_s, pool=None)
        self.http = httpx.AsyncClient(
            base_url=check_url(url),
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=connect_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S),
            trust_env=proxies,
            transport=transport,
        )
        """The underlying client, for calls without a method here."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self.http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """The models of the server."""
        return await self._call("GET", "/v1/models", lambda answer: [_object(model) for model in answer["data"]])

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One completion that is not streamed."""
        return await self._call("POST", COMPLETIONS, _object, body)

    @asynccontextmanager
    async def stream(self, body: Mapping[str, Any], label: str = "") -> AsyncIterator[AsyncIterator[Event]]:
        """One streamed completion; inside the block, the server has accepted it. `label` is its X-Request-Id.

        The iterator yields each event as it comes, error events too, and raises `BadAnswer` for a stream that ends
        without `[DONE]`. Leaving the block closes the connection of a stream that has not ended.
        """
        headers = {"X-Request-Id": label} if label else {}
        request = self.http.build_request("POST", COMPLETIONS, json=body, headers=headers, timeout=self._stream_timeout)
        with _translated("POST", COMPLETIONS):
            response = await self.http.send(request, stream=True)
        async with aclosing(response):
            if not response.is_success:
                with _translated("POST", COMPLETIONS):
                    answer = await response.aread()
                raise ErrorAnswer(response.status_code, response.reason_phrase, answer)
            async with aclosing(_events(response)) as events:
                yield events

    async def hand_over(self) -> dict[str, Any]:
        """The document at `/mell/hand-over`."""
        return await self._call("GET", HAND_OVER, _object)

    async def begin_hand_over(self, to: str, key: str | None) -> dict[str, Any]:
        """Hand all requests over to the Mell at `to`, whose admin key is `key`; the answer."""
        return await self._call("POST", HAND_OVER, _object, {"to": to, "admin_key": key})

    async def undo_hand_over(self) -> dict[str, Any]:
        """Hand no more requests over; the answer."""
        return await self._call("DELETE", HAND_OVER, _object)

    async def state(self) -> dict[str, Any]:
        """The document at `/mell/state`."""
        return await self._call("GET", STATE, _object)

    async def migrations(self) -> list[dict[str, Any]]:
        """The records at `/mell/migrations`, newest first."""
        return await self._call("GET", MIGRATIONS, lambda answer: [_object(record) for record in answer["migrations"]])

    async def move(self, request: str, path: str = "auto", target: str | None = None) -> str:
        """Order a migration of the request with this id or label; the migration's id."""
        order = {"request_id": request, "path": path} | ({"target": target} if target is not None else {})
        return await self._call("POST", MIGRATIONS, lambda answer: str(answer["id"]), order)

    async def drain(self, replica: str) -> dict[str, Any]:
        """Order a drain of a replica; the answer."""
        return await self._call("POST", f"/mell/replicas/{quote(replica, safe='')}/drain", _object)

    async def drain_node(self, node: str, within_s: float | None) -> dict[str, Any]:
        """Order a drain of the nodes with this id, address or host name; the answer."""
        return await self._call("POST", f"/mell/nodes/{quote(node, safe='')}/drain", _object, {"within_s": within_s})

    async def set_bounds(self, least: int, most: int, model: str | None = None) -> dict[str, Any]:
        """`POST /mell/bounds`: the answer. `model` is needed if there are several."""
        order = {"min_replicas": least, "max_replicas": most} | _of_model(model)
        return await self._call("POST", "/mell/bounds", _object, order)

    async def set_level(
        self, service_class: str, ttft_p99_s: float | None, itl_p99_ms: float | None, model: str | None = None
    ) -> dict[str, Any]:
        """`POST /mell/level`: the answer. `model` is needed if there are several."""
        times = {"ttft_p99_s": ttft_p99_s, "itl_p99_ms": itl_p99_ms}
        order = {"class": service_class} | {name: time for name, time in times.items() if time is not None}
        order |= _of_model(model)
        return await self._call("POST", "/mell/level", _object, order)

    async def set_role(self, replica: str, role: str | None) -> dict[str, Any]:
        """Set a replica's role, or with None have Mell assign it again; the answer."""
        return await self._call("POST", f"/mell/replicas/{quote(replica, safe='')}/role", _object, {"role": role})

    async def set_memory(self, replica: str, blocks: int | None) -> dict[str, Any]:
        """Set the size of a replica's KV pool, or with None that of its start; the answer."""
        return await self._call("POST", f"/mell/replicas/{quote(replica, safe='')}/memory", _object, {"blocks": blocks})

    async def set_asleep(self, kind: str, name: str, asleep: bool) -> dict[str, Any]:
        """Have a replica (`kind` is `replicas`) or a model (`models`) fall asleep or wake; the answer."""
        verb = "sleep" if asleep else "wake"
        return await self._call("POST", f"/mell/{kind}/{quote(name, safe='')}/{verb}", _object)

    async def pair(self, lower: str, upper: str) -> dict[str, Any]:
        """`POST /mell/pairs`: the answer."""
        return await self._call("POST", "/mell/pairs", _object, {"lower": lower, "upper": upper})

    async def unpair(self, replica: str) -> dict[str, Any]:
        """`DELETE /mell/pairs/{replica}`: the answer."""
        return await self._call("DELETE", f"/mell/pairs/{quote(replica, safe='')}", _object)

    async def mode(self) -> dict[str, str]:
        """The scheduler's mode and the configured one: the document at `/mell/mode`."""
        return await self._call(
            "GET", MODE, lambda answer: {name: str(answer[name]) for name in ("mode", "configured_mode")}
        )

    async def set_mode(self, mode: str) -> dict[str, Any]:
        """Set the scheduler's mode; the answer."""
        return await self._call("POST", MODE, _object, {"mode": mode})

    async def match(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """The placement that a prompt would get: the document at `/mell/cache/match`, for a body of it."""
        return await self._call("POST", MATCH, _object, prompt)

    async def copy(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Copy cached blocks by a body of `/mell/cache/copy`; the copy's record."""
        return await self._call("POST", COPY, _object, order)

    async def pin(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Keep blocks in host memory by a body of `/mell/cache/pin`; the answer."""
        return await self._call("POST", PIN, _object, order)

    async def drop(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Delete blocks from prefix caches by a body of DELETE `/mell/cache`; the answer."""
        return await self._call("DELETE", CACHE, _object, order)

    async def health(self) -> None:
        """Returns if the server accepts requests."""
        await self._send("GET", "/health")

    async def _call(
        self, method: str, path: str, read: Callable[[Any], Read], body: Mapping[str, Any] | None = None
    ) -> Read:
        response = await self._send(method, path, body)
        try:
            return read(response.json())
        except (LookupError, TypeError, ValueError) as error:
            raise BadAnswer("bad answer", f"{method} {path} is not understood: {error!r}") from None

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        with _translated(method, path):
            response = await self.http.request(method, path, json=body)
        if not response.is_success:
            raise ErrorAnswer(response.status_code, response.reason_phrase, response.content)
        return response


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.100} is not an object")
    return value


async def _events(response: httpx.Response) -> AsyncGenerator[Event, None]:
    decoder = EventDecoder()
    with _translated("POST", COMPLETIONS):
        async for data in response.aiter_bytes():
            for event in decoder.feed(data):
                yield event
    decoder.end()


@contextmanager
def _translated(method: str, path: str) -> Iterator[None]:
    """Translate httpx's errors into this client's."""
    try:
        yield
    except httpx.ConnectError as error:
        raise NobodyListens(type(error).__name__, str(error) or type(error).__name__) from error
    except httpx.TimeoutException as error:
        raise NoAnswer(type(error).__name__, f"{method} {path} took too long") from error
    except httpx.HTTPError as error:
        raise NoAnswer(type(error).__name__, str(error) or type(error).__name__) from error


def _of_model(model: str | None) -> dict[str, str]:
    """The member of an order that names a model."""
    return {} if model is None else {"model": model}
