"""The capacity of a pooling model's engine, measured at its start.

A pooled request needs time rather than memory. It holds KV blocks only while its prompt is computed, and none in a
model whose attention is bidirectional, which has no KV cache at all. With the KV cache as its capacity, a replica would
look empty however many requests wait in it, and all requests would be placed on one.

So the capacity is the number of tokens that the engine computes within `CAPACITY_S`, and a request occupies its prompt
until it ends. The scheduler counts a placement for `policies.decision.limits.Terms.placement_ttl_s` unless a report
confirms it, which few pooled requests live to see: of a replica's capacity, the same share is occupied as of its time.
"""

import asyncio
import random
from collections.abc import Sequence

import msgspec
from vllm.config import VllmConfig
from vllm.pooling_params import PoolingParams

from migration.protocol.continuing import to_spec
from migration.protocol.core_messages import CoreRequest, encode_request
from migration.protocol.ports import Clock
from migration.protocol.request import IngressId, RequestSpec
from migration.run.outputs import Runner, running
from policies.model import RequestId, Tokens

CAPACITY_S = 2.0
"""The time that an engine takes to compute its capacity, in seconds; that of `placement_ttl_s`."""

_PROMPT = 256
"""The largest length of a prompt of the measurement, in tokens."""
_ROUND_S = 0.5
"""The longest time of a round of the measurement; a slow engine gets fewer prompts."""
_ROUNDS = 2
"""The fastest counts, since disturbances only add time."""

_TOKEN_IDS = 200
"""The token ids of prompts are below it: in large vocabularies, later ones stand for images."""
_OF_TOKENS = ("embed", "classify", "token_embed", "token_classify")
"""Tasks whose requests need no more than tokens."""

_encoder = msgspec.msgpack.Encoder()


async def measure_capacity(engine: Runner, config: VllmConfig, tasks: Sequence[str], clock: Clock) -> Tokens:
    """The engine's capacity in tokens, at least the model's context; takes about a second.

    A model whose requests need other input than tokens is not measured: its capacity is a full step.

    Raises:
        EngineDead, InvalidRequest, RequestFailed: the engine does not run a request.
    """
    context: int = config.model_config.max_model_len
    step: int = config.scheduler_config.max_num_batched_tokens
    task = config.model_config.get_pooling_task(tuple(tasks))
    if task not in _OF_TOKENS:
        return Tokens(max(context, step))
    params = PoolingParams(task=task)
    params.verify(config.model_config)
    vocabulary: int = config.model_config.get_vocab_size()
    load = _Load(engine, params, min(_PROMPT, context), min(_TOKEN_IDS, vocabulary), clock)
    await load.run_s(1)  # the first one compiles
    once_s = await load.run_s(1)
    full = min(config.scheduler_config.max_num_seqs, step // load.length)
    prompts = max(1, min(full, int(_ROUND_S / once_s)))
    round_s = min([await load.run_s(prompts) for _ in range(_ROUNDS)])
    return Tokens(max(context, int(prompts * load.length / round_s * CAPACITY_S)))


class _Load:
    """Requests of prompts of `length` random tokens below `token_ids`, none of which begins like another."""

    def __init__(self, engine: Runner, params: PoolingParams, length: int, token_ids: int, clock: Clock) -> None:
        self.length = length
        self._token_ids = token_ids
        self._engine = engine
        self._params = msgspec.Raw(_encoder.encode(params))
        self._clock = clock
        self._draw = random.Random(0)
        self._made = 0

    async def run_s(self, prompts: int) -> float:
        """Run that many requests at once. Returns the seconds until all have ended."""
        specs = [self._next() for _ in range(prompts)]
        began = self._clock()
        await asyncio.gather(*map(self._run, specs))
        return self._clock() - began

    async def _run(self, spec: RequestSpec) -> None:
        async with running(self._engine, spec.id, spec) as steps:
            async for _ in steps:
                pass

    def _next(self) -> RequestSpec:
        self._made += 1
        id = f"pool-{self._made}"
        prompt = [self._draw.randrange(self._token_ids) for _ in range(self.length)]
        request = CoreRequest(id, prompt, pooling_params=self._params)
        return to_spec(request, encode_request(request), RequestId(id), "", IngressId(""))
