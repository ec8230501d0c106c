"""API keys at rest: names, SHA-256 digests and limits, as a list in YAML or JSON.

A key has 256 random bits, so a plain digest is as hard to invert as the key is to guess; slow hashes are for passwords.
"""

import hashlib
import hmac
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from app.ingress.access.limits import KeyLimits

VARIABLE = "MELL_API_KEYS"
"""The environment variable that holds the list if there is no file."""

_PREFIX = "mell-"
_MADE_BY = "`python -m app.keys NAME` makes a key and its entry"


class InvalidKeys(ValueError):
    """An invalid list of keys, or an invalid admin key. The message has the correction and never a value of them."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key; `sha256` is the digest of its UTF-8 text in lower-case hexadecimal digits.

    Keys of one name are keys of one client, as while a key is replaced: they have its limits together.

    `classes` are the service classes that its requests may have, none: all of them. The first is that of requests that
    name no class. `models` are the ids of the models that they may name, none: all of them.
    """

    name: str
    sha256: str
    limits: KeyLimits = field(default_factory=KeyLimits)
    classes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent_requests: int | None = Field(None, ge=1)
    classes: list[str] | None = Field(None, min_length=1)
    models: list[str] | None = Field(None, min_length=1)

    def key(self) -> ApiKey:
        limits = KeyLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)
        return ApiKey(self.name, self.sha256, limits, tuple(self.classes or ()), tuple(self.models or ()))


_SHARED = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "classes", "models")
"""The members that all keys of one name have in common."""
_ENTRIES = TypeAdapter(list[_Entry])
_EXPECTED = {
    "name": "1 to 64 of A-Za-z0-9._-, in quotes if it looks like a number",
    "sha256": f"64 hexadecimal digits, in lower case; {_MADE_BY}",
    "classes": "a list with the name of a service class, or leave it out",
    "models": "a list with the model_id of a model, or leave it out",
}


def parse_keys(text: str, where: str) -> tuple[ApiKey, ...]:
    """The keys of a list in YAML or JSON, at least one. `where` names the list in errors.

    Raises:
        InvalidKeys: the text is not a valid list of keys, is empty, repeats a key, or has two limits for a name.
    """
    try:
        listed = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InvalidKeys(f"{where}{f', line {mark.line + 1}' if mark else ''}: neither YAML nor JSON") from None
    try:
        entries = _ENTRIES.validate_python(listed)
    except pydantic.ValidationError as error:
        raise InvalidKeys(f"{where}: {_explain(error.errors(include_input=False)[0])}") from None
    if not entries:
        raise InvalidKeys(f"{where}: the list is empty; {_MADE_BY}")
    _check_distinct(where, entries)
    return tuple(_of_its_name(where, entry, entries).key() for entry in entries)


def check_classes(keys: Iterable[ApiKey], known: Collection[str], where: str) -> None:
    """Raise InvalidKeys if a key lists a service class that is not `known`. `where` names the list in errors."""
    for number, key in enumerate(keys, 1):
        if others := [name for name in key.classes if name not in known]:
            raise InvalidKeys(f"{where}: key {number} lists {others[0]!r}; the classes are {', '.join(known)}")


def check_models(keys: Iterable[ApiKey], known: Collection[str], where: str) -> None:
    """Raise InvalidKeys if a key lists a model that is not `known`. `where` names the list in errors."""
    for number, key in enumerate(keys, 1):
        if others := [name for name in key.models if name not in known]:
            raise InvalidKeys(f"{where}: key {number} lists {others[0]!r}; the models are {', '.join(known)}")


def _explain(first: Any) -> str:
    loc = first["loc"]
    if not loc:
        return f"not a list of keys; {_MADE_BY}"
    entry = f"key {loc[0] + 1}"
    if len(loc) == 1:
        return f"{entry} is not a mapping with name and sha256; {_MADE_BY}"
    name = loc[1]
    match first["type"]:
        case "extra_forbidden" | "invalid_key":
            return f"{entry} has an unknown member; the members are {', '.join(_Entry.model_fields)}"
        case "missing":
            return f"{entry} has no {name}; {_MADE_BY}"
        case _:
            return f"{entry}, {name}: write {_EXPECTED.get(str(name), 'a whole number above 0, or leave it out')}"


def _check_distinct(where: str, entries: list[_Entry]) -> None:
    digests = [entry.sha256 for entry in entries]
    for number, value in enumerate(digests):
        if (first := digests.index(value)) < number:
            raise InvalidKeys(f"{where}: keys {first + 1} and {number + 1} have the same sha256")


def _of_its_name(where: str, entry: _Entry, entries: list[_Entry]) -> _Entry:
    """The entry with the limits and classes of all entries of its name, one of which need have them."""
    found: dict[str, Any] = {}
    for number, other in enumerate(entries, 1):
        for name in _SHARED if other.name == entry.name else ():
            value = getattr(other, name)
            if value is not None and found.setdefault(name, value) != value:
                raise InvalidKeys(f"{where}: key {number}, {name}: write that of the other keys with its name")
    return entry.model_copy(update=found)


class WatchedFile:
    """A small text file that is read again when it has changed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None

    def changed(self) -> str | None:
        """The text if the file has changed since the last call, else None.

        Raises:
            InvalidKeys: the file cannot be read; once per change.
        """
        path, before = Path(self.path), self._seen
        self._seen = ()
        try:
            status = path.stat()
            self._seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            return path.read_text("utf-8") if self._seen != before else None
        except (OSError, UnicodeDecodeError) as error:
            if before == ():
                return None
            raise InvalidKeys(f"{self.path} cannot be read: {getattr(error, 'strerror', 'not UTF-8')}") from None


class KeyFile:
    """A file with a list of keys, reloaded when the file has changed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = WatchedFile(path)

    def read(self) -> tuple[ApiKey, ...]:
        """The keys in the file. Raises InvalidKeys."""
        self._file = WatchedFile(self.path)
        keys = self.changed()
        assert keys is not None
        return keys

    def changed(self) -> tuple[ApiKey, ...] | None:
        """The keys if the file has changed since the last call, else None. Raises InvalidKeys, once per change."""
        text = self._file.changed()
        return None if text is None else parse_keys(text, self.path)


def new_key() -> str:
    """A new key with 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def entry(name: str, key: str) -> str:
    """A key's list entry, as YAML. Raises InvalidKeys for an invalid name."""
    text: str = yaml.safe_dump([{"name": name, "sha256": digest(key)}], sort_keys=False)
    try:
        parse_keys(text, name)
    except InvalidKeys:
        raise InvalidKeys(f"{name!r} is not a valid name: write {_EXPECTED['name']}") from None
    return text


def digest(key: str) -> str:
    """SHA-256 of a key in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def find(keys: Iterable[ApiKey], given: str) -> ApiKey | None:
    """The key equal to `given`, None without one. The comparison takes constant time."""
    given_digest, found = digest(given), None
    for key in keys:
        if hmac.compare_digest(given_digest, key.sha256):
            found = key
    return found


def bearer(authorization: str | None) -> str | None:
    """The key in an Authorization header, None without one. The scheme is case-insensitive (RFC 6750)."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
