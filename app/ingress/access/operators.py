"""Access of operators: by the admin key or, without one, from loopback."""

import hmac
import ipaddress
import logging
from typing import TYPE_CHECKING

from app.ingress.access.keys import InvalidKeys, WatchedFile
from app.ingress.errors import ApiError

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

log = logging.getLogger("ray.serve")

ADMIN_VARIABLE = "MELL_ADMIN_KEY"
"""The environment variable with the admin key, if the settings have neither key nor file. `mell` sends the same one."""

_LEAST = 8
"""Characters of the shortest admin key."""


def parse_admin_key(text: str, where: str) -> str:
    """The admin key in a text, without blanks around it. `where` names the text in errors. Raises InvalidKeys."""
    key = text.strip()
    if len(key) < _LEAST or not (key.isascii() and key.isprintable()):
        raise InvalidKeys(f"{where}: write a key of {_LEAST} or more printable ASCII characters on one line")
    return key


def read_admin_key(path: str) -> str:
    """The admin key in a file. Raises InvalidKeys."""
    return parse_admin_key(WatchedFile(path).changed() or "", path)


class OperatorAccess:
    """Decides who may call operators' routes: callers with `key` or, without a key, callers from loopback.

    The key of a `file` replaces `key`, and is read again when the file has changed. Raises InvalidKeys without one.
    """

    def __init__(self, key: str | None = None, file: str | None = None) -> None:
        self._key = key
        self._file = WatchedFile(file) if file is not None else None
        if self._file is not None:
            self._key = parse_admin_key(self._file.changed() or "", self._file.path)

    @property
    def has_key(self) -> bool:
        """True if operators need a key."""
        return self._key is not None

    def reload(self) -> None:
        """Read the key again if its file has changed. An invalid file is logged and changes nothing."""
        if self._file is None:
            return
        try:
            if (text := self._file.changed()) is not None:
                self._key = parse_admin_key(text, self._file.path)
                log.info("the admin key has been read again")
        except InvalidKeys as error:
            log.error("the admin key remains unchanged: %s", error)

    def check(self, http: "HTTPConnection") -> None:
        """Raise ApiError unless the caller has the admin key or, without one, calls from loopback and no other page."""
        if self._key is None:
            if not _is_loopback(http):
                raise ApiError(403, "without an admin key, /mell is open on loopback only: set ingress.admin_key")
            # Browsers send simple calls of any page, such as an order without a body, before they ask.
            if http.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                raise ApiError(403, "without an admin key, /mell is closed to web pages of other origins")
            return
        given = http.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
            raise ApiError(401, "this call requires Authorization: Bearer <admin key>", code="invalid_api_key")


def _is_loopback(http: "HTTPConnection") -> bool:
    try:
        return http.client is not None and ipaddress.ip_address(http.client.host).is_loopback
    except ValueError:
        return False
