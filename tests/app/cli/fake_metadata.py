"""A fake of the clouds' metadata services."""

import secrets
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route


@dataclass
class FakeMetadata:
    """A machine with the Azure name `gpu_3`: it ends at `time` once that is set. `broken`: every answer is a 503."""

    time: str | None = None
    broken: bool = False
    _tokens: set[str] = field(default_factory=set)

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/latest/api/token", self._token, methods=["PUT"]),
                Route("/latest/meta-data/spot/instance-action", self._ec2),
                Route("/computeMetadata/v1/instance/preempted", self._gce),
                Route("/metadata/instance/compute/name", self._azure_name),
                Route("/metadata/scheduledevents", self._azure),
            ]
        )

    def _token(self, request: Request) -> Response:
        assert 1 <= int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21_600
        self._tokens.add(token := secrets.token_hex(8))
        return PlainTextResponse(token)

    def _ec2(self, request: Request) -> Response:
        if request.headers.get("X-aws-ec2-metadata-token") not in self._tokens:
            return PlainTextResponse("", 401)
        if self.time is None:
            return self._answer(PlainTextResponse("", 404))
        return self._answer(JSONResponse({"action": "terminate", "time": self.time}))

    def _gce(self, request: Request) -> Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return PlainTextResponse("", 403)
        return self._answer(PlainTextResponse("FALSE" if self.time is None else "TRUE"))

    def _azure_name(self, request: Request) -> Response:
        assert dict(request.query_params) == {"api-version": "2021-02-01", "format": "text"}
        return self._answer_azure(request, PlainTextResponse("gpu_3"))

    def _azure(self, request: Request) -> Response:
        assert dict(request.query_params) == {"api-version": "2020-07-01"}
        event = {"EventType": "Preempt", "Resources": ["gpu_3"], "NotBefore": self.time}
        return self._answer_azure(request, JSONResponse({"Events": [] if self.time is None else [event]}))

    def _answer_azure(self, request: Request, answer: Response) -> Response:
        return self._answer(answer) if request.headers.get("Metadata") == "true" else PlainTextResponse("", 400)

    def _answer(self, answer: Response) -> Response:
        return PlainTextResponse("", 503) if self.broken else answer
