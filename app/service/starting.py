"""The start of an ingress: its own port, and the log of the start's progress, which ends with the ingress's URL."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from starlette.types import ASGIApp

from app.client.api import HAND_OVER_REQUESTS
from app.ingress.config import IngressConfig
from app.ingress.hand_over.taking import longest_message
from app.ingress.http.connections import Bounds
from app.ingress.http.server import BelowPath, HttpServer, endpoint, listen
from app.ingress.http.tls import TlsFiles

log = logging.getLogger("ray.serve")

_BIND_WAIT_S = 15.0
_READY = """Mell is ready. Try:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{{model}"messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
  API        {url}/v1
  live page  {url}/mell/"""


class StartProgress:
    """Logs the progress of a start until requests are taken, and of each model the initial replicas run."""

    def __init__(self, initial: Sequence[int], url: str, is_listening: bool, model: str = "") -> None:
        """`initial` are the numbers of replicas of all models. `model` is the one to try, if there are several."""
        self._initial = tuple(initial)
        self._model = f'"model": "{model}", ' if model else ""
        self.ended = False
        self._url = url
        self._is_listening = is_listening
        self._running = (0,) * len(self._initial)
        self._logged_running: int | None = None

    @classmethod
    def of(cls, config: IngressConfig) -> Self:
        """The progress of an ingress. Without a port of its own, Serve's proxy takes requests at once."""
        url = _own_url(config) if config.port else "http://127.0.0.1:8000"
        model = min(config.models[0].names) if len(config.models) > 1 else ""
        initial = [model.initial_replicas for model in config.models]
        return cls(initial, url, is_listening=config.port is None, model=model)

    @property
    def initial(self) -> int:
        """The number of replicas to wait for."""
        return sum(self._initial)

    @property
    def running(self) -> int:
        """The number of them that run: of no model are more than its initial ones awaited."""
        return sum(map(min, self._running, self._initial))

    def begin_listening(self) -> None:
        """Called once the port is open."""
        self._is_listening = True
        self._check()

    def count(self, running: Sequence[int]) -> None:
        """Called with the numbers of replicas that run, of all models."""
        self._running = tuple(running)
        self._check()

    def lower_initial(self, wanted: Sequence[int]) -> None:
        """Wait for no more than `wanted` replicas of each model."""
        self._initial = tuple(map(min, self._initial, wanted))
        self._check()

    def _check(self) -> None:
        if self.ended:
            return
        if self.running >= self.initial and self._is_listening:
            self.ended = True
            log.info(_READY.format(url=self._url, model=self._model))
        elif self.running != self._logged_running:
            self._logged_running = self.running
            log.info("%d of %d engines run", self.running, self.initial)


async def serve_own_port(app: ASGIApp, config: IngressConfig, service: str, progress: StartProgress) -> HttpServer:
    """Serve `app` at the configured port, which the ingresses of a service share. Raises OSError if it is taken."""
    assert config.port is not None
    listening = await listen(config.host, config.port, service, _BIND_WAIT_S)
    served = BelowPath(app, config.root_path) if config.root_path else app
    bounds = Bounds(websockets=frozenset({HAND_OVER_REQUESTS}), message_bytes=longest_message(config))
    if config.keep_alive_s is not None:
        bounds = replace(bounds, keep_alive_s=config.keep_alive_s)
    server = HttpServer(served, listening, bounds, TlsFiles.of(config))
    log.info("listening on %s", _own_url(config))
    progress.begin_listening()
    return server


def _own_url(config: IngressConfig) -> str:
    """The URL at which clients on this machine reach the ingress's own port."""
    assert config.port is not None
    return endpoint(config.host, config.port, config.ssl_certfile is not None) + config.root_path
