"""Shared by the tests of streams: requests, expected outputs, and reading."""

from deployments.engine.tokens import expected
from migration.protocol.messages import PathRequest
from migration.protocol.request import RequestSpec
from tests.app.ingress.fakes import Service, output
from tests.deployments.engine.quick_engine import prompt_of
from tests.migration.world import spec

KV, TOKENS = PathRequest.KV, PathRequest.TOKENS
LONG = 300
SLOW_S = 0.01
"""Slow enough that no request ends before its test ends it."""


def whole(request: RequestSpec) -> tuple[int, ...]:
    """The output of an undisturbed run."""
    return expected(prompt_of(request), request.max_tokens)


def sampled(seed: int | None, tokens: int = LONG) -> RequestSpec:
    return spec(tokens=tokens, seed=seed, temperature=1.0)


async def served(service: Service, request: RequestSpec) -> tuple[int, ...]:
    async with service.open(request) as conversation:
        return await output(conversation)
