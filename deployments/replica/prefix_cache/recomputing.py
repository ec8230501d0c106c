"""The audit of cached KV by recomputation: the next token of a cached context, with the cache and without it.

A wrong block would be used by every later request with its prefix, so whatever copies or moves blocks has checksums.
This is the check behind them all: an idle engine computes one token behind the cached blocks of a context that its
replica remembers, and then the same token anew from all tokens of the context.
"""

import logging
import random
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.cache.occupancy import Recomputed
from deployments.engine.port import Engine, EngineDead, InvalidRequest, RequestFailed
from deployments.replica.ingress_channels import Lacks, require_adapter
from deployments.replica.prefix_cache.contexts import PastContexts
from migration.protocol.continuing import probe
from migration.protocol.core_messages import decode_logprobs
from migration.protocol.errors import MigrationError
from migration.protocol.request import RequestSpec
from migration.run.outputs import running

log = logging.getLogger("ray.serve")

TOLERANCE = 0.25
"""The greatest difference of a token's logprob by rounding: prompts of other lengths are computed by other kernels."""


@dataclass(frozen=True, slots=True)
class _NextToken:
    """A token behind a prompt, the logprobs of the likeliest ones, and the number of cached tokens of the prompt."""

    token: int
    likeliest: Mapping[int, float]
    cached: int

    def agrees(self, other: "_NextToken") -> bool:
        """True if both are the same up to rounding: each one's token is nearly as likely by the other."""
        pairs = ((one.likeliest.get(token), two.likeliest.get(token)) for one, two, token in self._both(other))
        return all(a is not None and b is not None and abs(a - b) <= TOLERANCE for a, b in pairs)

    def _both(self, other: "_NextToken") -> "tuple[tuple[_NextToken, _NextToken, int], ...]":
        return (self, other, self.token), (self, other, other.token)


class Recomputation:
    """Recomputes contexts, one for each call of `check`, and counts in `ended` how that ended."""

    def __init__(self, engine: Engine, contexts: PastContexts, lacks: Lacks, draw: random.Random) -> None:
        self._engine = engine
        self._lacks = lacks
        self._contexts = contexts
        self._draw = draw
        self.ended: Counter[Recomputed] = Counter()

    async def check(self) -> Recomputed:
        """Recompute a random one of the remembered contexts."""
        try:
            ended = await self._check()
        except (EngineDead, InvalidRequest, RequestFailed, MigrationError) as error:
            log.info("a cached context was not recomputed: %r", error)
            ended = Recomputed.SKIPPED
        self.ended[ended] += 1
        return ended

    async def _check(self) -> Recomputed:
        engine, contexts = self._engine, list(self._contexts.newest_first())
        if not contexts:
            return Recomputed.SKIPPED
        context = self._draw.choice(contexts)
        outputs = tuple(context.outputs)
        await require_adapter(context.spec, self._lacks)
        names = engine.names(context.spec, outputs)
        held = names[: engine.mirror.held(names).hbm]
        end = len(held) * engine.fingerprint.block_size
        found = [probe(context.spec, outputs, end, reads_cache) for reads_cache in (True, False)]
        there, anew = [await self._next_token(spec) for spec in found if spec is not None] or (None, None)
        if there is None or anew is None or not there.cached or anew.cached:
            return Recomputed.SKIPPED
        if there.agrees(anew):
            return Recomputed.EQUAL
        # The blocks that were just computed have the same names, and go with them.
        deleted = await engine.delete(held)
        log.error("cached KV was wrong, %d blocks are deleted: with it comes %s, without it %s", deleted, there, anew)
        return Recomputed.DIFFERENT

    async def _next_token(self, spec: RequestSpec) -> _NextToken:
        async with running(self._engine, f"probe-{uuid.uuid4().hex[:12]}", spec) as steps:
            (step,) = [step async for step in steps]
        (token,), (logprobs,) = step.tokens, decode_logprobs(step.rest or b"")
        return _NextToken(token, dict(logprobs.top), 0 if step.prefilled is None else step.prefilled.cached)
