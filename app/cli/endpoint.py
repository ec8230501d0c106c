"""The operator's part of the HTTP API: `/mell` and `/health`."""

import ipaddress
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx

from app.cli.documents import Records, State, parse_migrations, parse_state
from app.cli.errors import Failed, NotThere

Document = TypeVar("Document")

STATE = "/mell/state"
MIGRATIONS = "/mell/migrations"
TIMEOUT = httpx.Timeout(10.0, connect=3.0)
"""Seconds. The ingress itself waits for the scheduler, but not that long."""

_KEY_HINT = "give --admin-key KEY, or set MELL_ADMIN_KEY; it is ingress.admin_key of the settings"


class Endpoint:
    """A Mell at a URL. Every call raises `NotThere` when nobody answers, and `Failed` when the answer is an error."""

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        # A proxy of the environment cannot reach this machine's loopback.
        proxies = not is_loopback(self.url)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT, trust_env=proxies)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def state_text(self) -> str:
        """The document at `/mell/state`, as it came."""
        text = self._get(STATE)
        self._parsed(STATE, text, parse_state)
        return text

    def state(self) -> State:
        """What `/mell/state` says."""
        return self._parsed(STATE, self._get(STATE), parse_state)

    def migrations(self) -> Records:
        """What `/mell/migrations` says, newest first."""
        return self._parsed(MIGRATIONS, self._get(MIGRATIONS), parse_migrations)

    def move(self, request: str, target: str | None, path: str) -> str:
        """Order a move; the id of the migration."""
        order = {"request_id": request, "target": target, "path": path}
        return str(self._parsed(MIGRATIONS, self._call("POST", MIGRATIONS, order), lambda answer: answer["id"]))

    def drain(self, replica: str) -> dict[str, Any]:
        """Order that a replica be emptied and stopped; the answer."""
        path = f"/mell/replicas/{quote(replica, safe='')}/drain"
        return self._parsed(path, self._call("POST", path), dict)

    def health(self) -> str | None:
        """Why requests cannot be served now, None if they can."""
        response = self._send("GET", "/health")
        return None if response.is_success else message_of(response)

    def _get(self, path: str) -> str:
        return self._call("GET", path)

    def _call(self, method: str, path: str, body: object = None) -> str:
        response = self._send(method, path, body)
        if response.is_success:
            return response.text
        message = message_of(response)
        if response.status_code == httpx.codes.NOT_FOUND and method == "GET":
            raise NotThere(f"{self.url} answers, but is not Mell: {method} {path} got 404, {message}")
        if response.status_code in (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT):
            raise NotThere(f"a proxy answers at {self.url}, and reaches no Mell: {message}")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message = f"{message}\n{_KEY_HINT}"
        raise Failed(message, body_of(response))

    def _send(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.ConnectError as error:
            raise NotThere(
                f"nothing listens at {self.url} ({error}); is `serve run serve_config.yaml` (or `make serve`) running "
                "there? --url or MELL_URL names another address"
            ) from None
        except httpx.TimeoutException:
            raise NotThere(f"{self.url} does not answer: {method} {path} took too long") from None
        except httpx.HTTPError as error:
            raise NotThere(f"{self.url} does not answer: {str(error) or type(error).__name__}") from None

    def _parsed(self, path: str, text: str, parse: Callable[[Any], Document]) -> Document:
        try:
            return parse(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise NotThere(f"{self.url} answers, but not as Mell does: {path} is not understood, {error!r}") from None


def body_of(response: httpx.Response) -> dict[str, Any]:
    """The document of an error; one is made of what is not a document."""
    try:
        body = response.json()
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"error": {"message": message_of(response)}}


def message_of(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape; of any other answer its status and beginning."""
    try:
        match response.json():
            case {"error": {"message": str(text)}}:
                return text
    except ValueError:
        pass
    return f"HTTP {response.status_code} {response.reason_phrase}: {response.text[:200]}".rstrip(": ")


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine itself."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
