"""Paced engines for tests: short steps, and room for all requests until a test takes it away."""

import os
from collections.abc import Sequence
from typing import Any

from deployments.engine.pace import Pace
from deployments.engine.paced import PacedEngine
from deployments.engine.port import EngineProcesses, Tie
from deployments.engine.tokens import ContextDigest, TokenSlots, expected, pack, token_layouts
from migration.protocol.core_messages import decode_logprobs, decode_request
from migration.protocol.messages import Fingerprint
from migration.protocol.request import RequestSpec
from policies.model import Blocks

BLOCK = 4
"""Tokens per block."""
CONTEXT = 1024
_REQUESTS = 64
_INSTANT_S = 1e-12


class QuickEngine(PacedEngine):
    """An engine whose steps take `step_s` seconds, with memory for as many requests of `context` tokens as may run.

    Each of its `workers` holds a part of every block's tokens.
    """

    def __init__(
        self,
        step_s: float = 0.001,
        context: int = CONTEXT,
        model: str = "fake",
        cache: str = "fake-cache",
        workers: int = 1,
    ) -> None:
        pace = Pace(
            num_gpu_blocks_override=_REQUESTS * -(-context // BLOCK),
            block_size=BLOCK,
            max_model_len=context,
            max_num_seqs=_REQUESTS,
            max_num_batched_tokens=_REQUESTS * context,
            decode_s=step_s or _INSTANT_S,
            decode_s_per_seq=0.0,
            prefill_tokens_per_s=1 / _INSTANT_S,
        )
        super().__init__(model, pace)
        self.fingerprint = Fingerprint(model, cache, BLOCK, token_layouts(BLOCK, workers))
        self.processes = EngineProcesses(core=os.getpid(), workers=(os.getpid(),) * workers)
        self._slots = TokenSlots(self.fingerprint.shard_bytes, workers)


def set_pace(engine: PacedEngine, **changes: Any) -> None:
    """Change arguments of an engine's pace from its next step on."""
    engine._pace = engine._batch._pace = engine._pace.model_copy(update=changes)
    engine._costs = engine._pace.costs


def preempt(engine: PacedEngine) -> None:
    """Take an engine's memory, and the blocks of its running request, which waits until a `resize`."""
    engine.resize(Blocks(0))
    engine._batch.scheduler.preempt(engine._batch.release)


def tie(engine: PacedEngine, why: Tie = Tie.SEEDED) -> None:
    """Have no other engine continue requests of an engine exactly."""
    engine.tied = lambda traits: why  # type: ignore[method-assign]


def blocks_of(engine: PacedEngine) -> dict[int, bytes]:
    """The content of the blocks in an engine's prefix cache, by their names."""
    return {name: bytes(block.held) for name, block in engine._batch.pool.named.items()}


def is_unused(engine: PacedEngine) -> bool:
    """True if an engine has no request, held prefix or held tail, and no block is in use; or if it has ended."""
    pool = engine._batch.pool
    held = engine._outputs or engine._holds or engine._slots.held_tails or pool.free != pool.size
    return engine.death is not None or not held


def prompt_of(spec: RequestSpec) -> tuple[int, ...]:
    """The prompt in a request's body."""
    return tuple(decode_request(spec.body).prompt_token_ids or ())


def expected_logprobs(prompt: Sequence[int], count: int, top: int) -> list[Any]:
    """The logprobs of each token of an undisturbed run."""
    contexts = ((*prompt, *expected(prompt, index)) for index in range(count))
    return [decode_logprobs(ContextDigest(pack(context)).next_logprobs(top)) for context in contexts]
