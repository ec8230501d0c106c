"""vLLM's own scheduler over Mell's connector, and a worker whose model is a hash: a step takes microseconds.

The KV of a token is a hash of all tokens up to it, and the next token follows from the KV of the last one. A step reads
the KV of all tokens before those that it computes: if a block holds anything else than the context's own KV, the output
differs from that of `expected`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from app.settings import CPU_ENGINE
from app.tinymodel import ensure_tiny_model
from deployments.cache.mirror import Mirror
from deployments.engine.arguments import engine_config
from migration.kv.cache_events import decode_batch, decode_names, pool_contents
from migration.kv.host.host_tier import HostTierWorker
from migration.kv.host.tiered import TieredConnector
from migration.protocol.errors import LoadOver, TransferFailed

BLOCK, LAYERS, VOCABULARY = 4, 2, 50
_SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)


def chain(tokens: Sequence[int], seed: int = 1) -> list[int]:
    """The KV of each token."""
    found, value = [], seed
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % 2_147_483_647
        found.append(value)
    return found


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The output of a request."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chain(tokens)[-1] % VOCABULARY)
    return tokens[len(prompt) :]


def tiered_config(slots: int) -> VllmConfig:
    """vLLM's configuration of an engine with a tier of that many blocks."""
    page = 4096  # vLLM counts whole pages of the host's memory for each block.
    config = engine_config(str(ensure_tiny_model()), dict(CPU_ENGINE), dram_gib=slots * page / (1 << 30))
    config.cache_config.block_size = BLOCK
    config.scheduler_config.max_num_batched_tokens = config.scheduler_config.max_num_scheduled_tokens = 24
    config.scheduler_config.max_num_seqs = 6
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


class LateTransfers(HostTierWorker):
    """A worker whose transfers are made some steps later, as by the streams of a GPU."""

    def __init__(self, memory: Any) -> None:
        super().__init__(memory)
        self._queued: dict[int, tuple[int, Callable[[], bool]]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._queued[job_id] = (2, partial(super().submit_store, job_id, src_spec, dst_spec))
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        self._queued[job_id] = (2, partial(super().submit_load, job_id, src_spec, dst_spec))
        return True

    def wait(self, job_ids: set[int]) -> None:
        for job_id in [job_id for job_id in self._queued if job_id in job_ids]:
            self._queued.pop(job_id)[1]()

    def get_finished(self) -> list[TransferResult]:
        self._queued = {job_id: (steps - 1, make) for job_id, (steps, make) in self._queued.items()}
        self.wait({job_id for job_id, (steps, _) in self._queued.items() if not steps})
        return super().get_finished()


class HashEngine:
    """The scheduler, one worker, and a mirror that follows the events. Transfers of the tier may be `late`."""

    def __init__(self, config: VllmConfig, blocks: int, late: bool = False) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        names = [f"layers.{layer}" for layer in range(LAYERS)]
        page = _SPEC.page_size_bytes
        cache = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(LAYERS * blocks * page, names, blocks * page, page)],
            kv_cache_groups=[KVCacheGroupSpec(names, _SPEC)],
        )
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK, log_stats=True)
        self.scheduler.kv_event_publisher = SimpleNamespace(publish=self._publish)
        self.mirror = Mirror()
        self.worker = TieredConnector(config, KVConnectorRole.WORKER, cache)
        self.memory = torch.zeros((LAYERS, blocks, 1, BLOCK, 2))
        self.worker.register_kv_caches(dict(zip(names, self.memory, strict=True)))
        self.worker.runner = SimpleNamespace()
        if late:
            worker: Any = self.worker._tier.connector_worker
            worker.worker = LateTransfers(self.host)
        self.kv = self.memory.view(torch.int32)[:, :, 0, :, 0]
        """The KV of each layer, block and token."""
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        """The tokens of prompts that were not computed."""
        self.lost: set[str] = set()
        """Requests that vLLM ended with an error."""
        self.contexts: dict[str, list[int]] = {}
        """The contexts of loads, by their names."""
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    # --- requests -------------------------------------------------------------------------------------

    def add(self, name: str, prompt: Sequence[int], count: int, **params: Any) -> Request:
        sampling = SamplingParams(max_tokens=count, extra_args={"kv_transfer_params": {"mell_key": name, **params}})
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def add_load(self, name: str, context: Sequence[int], first: int, last: int) -> None:
        """A load of blocks [first, last) of a context, which `copy` fills."""
        self.contexts[name] = list(context)
        wanted = {"load": name, "first": first, "last": last}
        self.add(name, context[: last * BLOCK + 1], 1, mell_load=wanted)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def copy(self, name: str, block: int) -> None:
        """The copier's work: fill a block of a load, if the load waits for it."""
        try:
            with self.worker.loads.writing(name, block, block + 1) as ((blocks, _), _):
                for target in blocks:
                    self._write(target, chain(self.contexts[name])[block * BLOCK : (block + 1) * BLOCK])
        except (LoadOver, TransferFailed):
            pass

    # --- steps ----------------------------------------------------------------------------------------

    def step(self, meanwhile: Any = None) -> None:
        """One step of the engine; `meanwhile` is called during its forward pass, by the copier."""
        output = self.scheduler.schedule()
        result = self._execute(output, meanwhile)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                if each.prefill_stats is not None:
                    self.cached[each.request_id] = each.prefill_stats.num_cached_tokens
                if str(each.finish_reason) == "error":
                    self.lost.add(each.request_id)

    def _execute(self, output: SchedulerOutput, meanwhile: Any) -> ModelRunnerOutput:
        worker, meta = self.worker, output.kv_connector_metadata
        assert meta is not None
        worker.handle_preemptions(meta)
        self._update_tables(output)
        worker.bind_connector_metadata(meta)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        sampled = [self._forward(name, count) for name, count in output.num_scheduled_tokens.items()]
        if meanwhile is not None:
            meanwhile()
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        connector = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            names,
            {name: index for index, name in enumerate(names)},
            [tokens for tokens in sampled],
            kv_connector_output=connector,
        )

    def _update_tables(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, fresh, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            blocks = list(fresh[0]) if fresh else []
            self._tables[name] = blocks if name in cached.resumed_req_ids else self._tables[name] + blocks
            self._computed[name] = computed

    def _forward(self, name: str, count: int) -> list[int]:
        """Compute `count` tokens of a request; its next token, if they are its last ones."""
        request, table, before = self.scheduler.requests[name], self._tables[name], self._computed[name]
        tokens = list(request.all_token_ids)
        read = self._read(table, before)
        values = chain(tokens[before : before + count], read[-1] if read else 1)
        for position, value in enumerate(values, before):
            self.kv[:, table[position // BLOCK], position % BLOCK] = value
        if before + count < len(tokens):
            return []
        # Any wrong value in the context changes the token, as attention would.
        wrong = sum(a != b for a, b in zip(read, chain(tokens[:before]), strict=True))
        token = (values[-1] + wrong) % VOCABULARY
        self.outputs[name].append(token)
        return [token]

    def _read(self, table: Sequence[int], count: int) -> list[int]:
        blocks = self.kv[:, table[: -(-count // BLOCK)]].flatten(1)[:, :count]
        assert torch.equal(blocks[0], blocks[1]), "the layers differ"
        found: list[int] = blocks[0].tolist()
        return found

    def _write(self, block: int, values: Sequence[int]) -> None:
        self.kv[:, block] = torch.tensor(values, dtype=torch.int32)

    # --- events ---------------------------------------------------------------------------------------

    def _publish(self, batch: KVEventBatch) -> None:
        events = decode_batch(msgspec.msgpack.Encoder().encode(batch))
        self.mirror.take(self.mirror.version + 1, events)

    def contents(self) -> Mapping[str, list[int]]:
        """The names in pool and tier."""
        connector: Any = self.scheduler.connector
        contents = pool_contents(self.scheduler.kv_cache_manager.block_pool, connector._manager.names())
        return {"hbm": sorted(decode_names(contents.names)), "dram": sorted(decode_names(contents.host))}

    @property
    def host(self) -> Any:
        """The worker's host memory."""
        return self.worker._worker._memory


def draw_prompt(draw: random.Random) -> list[int]:
    """A prompt with one of a few beginnings."""
    beginning = random.Random(draw.randrange(4)).choices(range(VOCABULARY), k=draw.choice((8, 17, 30)))
    return [*beginning, *draw.choices(range(VOCABULARY), k=draw.randrange(1, 6))]
