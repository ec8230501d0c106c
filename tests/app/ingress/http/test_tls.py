"""TLS of the ingress's own server: its certificates, those of clients, and their renewal."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from app.ingress.http import tls
from app.ingress.http.server import HttpServer, endpoint, listen
from app.ingress.http.tls import TlsFiles
from app.settings import IngressSettings
from tests.app.ingress.http.certificates import Certificate, make


async def _scheme(http: Request) -> PlainTextResponse:
    return PlainTextResponse(http.url.scheme)


def files(**settings: Any) -> TlsFiles | None:
    return TlsFiles.of(IngressSettings(**settings))


def trusting(authority: Certificate, own: Certificate | None = None) -> ssl.SSLContext:
    """The context of a client that trusts an authority and may have a certificate of its own."""
    context = ssl.create_default_context(cafile=authority.certfile)
    if own is not None:
        context.load_cert_chain(own.certfile, own.keyfile)
    return context


@asynccontextmanager
async def serving(held: TlsFiles | None) -> AsyncIterator[str]:
    listening = await listen("127.0.0.1", 0, "mell", wait_s=0)
    server = HttpServer(Starlette(routes=[Route("/", _scheme)]), listening, tls=held)
    try:
        yield endpoint("127.0.0.1", listening.getsockname()[1], held is not None)
    finally:
        await server.close(1)


async def get(url: str, context: ssl.SSLContext) -> str:
    async with httpx.AsyncClient(trust_env=False, verify=context) as client:
        return (await client.get(url)).text


@pytest.fixture
def authority(tmp_path: Path) -> Certificate:
    return make(tmp_path, "authority")


async def test_clients_that_trust_the_authority_are_answered(tmp_path: Path, authority: Certificate) -> None:
    own = make(tmp_path, "own", authority)
    async with serving(files(ssl_certfile=own.certfile, ssl_keyfile=own.keyfile)) as url:
        assert url.startswith("https://") and await get(url, trusting(authority)) == "https"
        with pytest.raises(httpx.ConnectError):
            await get(url, trusting(make(tmp_path, "another")))
        with pytest.raises(httpx.RemoteProtocolError):
            await get(url.replace("https", "http"), trusting(authority))


async def test_clients_need_a_certificate_if_it_is_required(tmp_path: Path, authority: Certificate) -> None:
    own, client = make(tmp_path, "own", authority), make(tmp_path, "client", authority)
    settings = {"ssl_certfile": own.certfile, "ssl_keyfile": own.keyfile, "ssl_ca_certs": authority.certfile}
    async with serving(files(**settings, ssl_cert_reqs=2)) as url:
        assert await get(url, trusting(authority, client)) == "https"
        stranger = make(tmp_path, "stranger", make(tmp_path, "another"))
        for context in (trusting(authority), trusting(authority, stranger)):
            with pytest.raises(httpx.TransportError):
                await get(url, context)


async def test_a_renewed_certificate_is_loaded(
    tmp_path: Path, authority: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls.TlsFiles.refresh, "__defaults__", (0.01,))
    own = make(tmp_path, "own", authority)
    async with serving(files(ssl_certfile=own.certfile, ssl_keyfile=own.keyfile)) as url:
        assert await get(url, trusting(authority)) == "https"
        own.spoil()
        await asyncio.sleep(0.05)
        assert await get(url, trusting(authority)) == "https", "the earlier one is in use"
        successor = make(tmp_path, "successor")
        make(tmp_path, "own", successor)
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await get(url, trusting(successor)) == "https"
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.01)


def test_without_a_certificate_there_is_no_tls() -> None:
    assert files() is None and endpoint("0.0.0.0", 80) == "http://127.0.0.1:80"


def test_settings_are_checked_against_the_files(tmp_path: Path, authority: Certificate) -> None:
    own = make(tmp_path, "own", authority)
    pair = {"ssl_certfile": own.certfile, "ssl_keyfile": own.keyfile}
    assert files(**pair, ssl_ciphers="ECDHE+AESGCM") == TlsFiles(own.certfile, own.keyfile, ciphers="ECDHE+AESGCM")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ssl_keyfile": own.keyfile}, "ssl_keyfile: set ssl_certfile"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs: set ssl_certfile"),
        ({**pair, "ssl_cert_reqs": 1}, "set ssl_ca_certs"),
        ({**pair, "port": None}, "set port"),
        ({**pair, "ssl_certfile": str(tmp_path / "none.pem")}, "none.pem is no file"),
        ({**pair, "ssl_keyfile": authority.keyfile}, "cannot be loaded"),
        ({**pair, "ssl_ciphers": "none of them"}, "cannot be loaded"),
    ]
    for settings, advice in wrong:
        with pytest.raises(ValueError, match=advice):
            IngressSettings.model_validate(settings)


def test_a_file_that_cannot_be_seen_is_a_change_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "certificate").touch()
    files = TlsFiles(str(tmp_path / "certificate"), str(tmp_path / "certificate" / "key"))
    seen = files._changed()
    assert seen[0] is not None and seen[1] is None
    (tmp_path / "certificate").unlink()
    assert files._changed() == [None, None]
