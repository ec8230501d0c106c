"""Transports of KV blocks by their names in the configuration, and the memory of their staging slots.

shared       host memory    replicas of one node map each other's slots
collective   host memory    sent through Ray collective groups over gloo
cuda_ipc     GPU memory     replicas of one node map each other's slots
nccl         GPU memory     sent through Ray collective groups over NCCL; every replica has a GPU of its own
"""

import importlib
from functools import partial

from deployments.config import AUTO, MAPPED, ON_GPU, MigrationSettings
from migration.kv.device import DeviceSegment
from migration.kv.staging import HostSegment, free_host_memory
from migration.protocol.messages import Fingerprint
from migration.protocol.ports import Transport
from migration.protocol.sizing import MAPPED_SLOTS, MIB, SENT_SLOTS, StagingSizes, efficient_slot
from migration.run.slots import Slots
from migration.transport.shared import SharedSlots
from policies.model import Blocks, Bytes, Tokens

_THREADS = 8
"""Concurrent transfers of one worker's slots; each blocks a thread of the replica."""


def make_transport(config: MigrationSettings, sizes: StagingSizes) -> Transport:
    """The configured transport of a replica with such staging slots.

    "module:attribute" names a custom factory, which is called with the settings.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such attribute.
    """
    limit_s = config.transfer_s(sizes.slot_bytes)
    match config.transport:
        case "shared":
            return SharedSlots()
        case "cuda_ipc":
            return SharedSlots("cuda_ipc", elsewhere="nccl")
        case "collective":
            from migration.transport import gloo_group
            from migration.transport.collective import CollectiveGroups

            gloo_group.register(limit_s)
            return CollectiveGroups(gloo_group.BACKEND, limit_s, sizes.workers * _THREADS)
        case "nccl":
            from migration.transport import nccl_group
            from migration.transport.collective import CollectiveGroups, DeviceMemory

            nccl_group.register(limit_s)
            threads = sizes.workers * _THREADS
            return CollectiveGroups(nccl_group.BACKEND, limit_s, threads, DeviceMemory())
    module, _, attribute = config.transport.partition(":")
    made: Transport = getattr(importlib.import_module(module), attribute)(config)
    return made


def size_slots(config: MigrationSettings, cache: Fingerprint, context: Tokens, on_gpu: bool) -> StagingSizes:
    """The sizes of a replica's staging slots, for a cache `on_gpu` or not, and contexts of up to `context` tokens.

    Raises:
        RuntimeError: a slot of `slot_mib` does not hold a KV block.
    """
    shard = cache.shard_bytes
    slot_bytes = efficient_slot(shard, Blocks(-(-context // cache.block_size)), on_gpu)
    if config.slot_mib != AUTO:
        slot_bytes = Bytes(config.slot_mib * MIB)
        if shard > slot_bytes:
            least = f"write at least {-(-shard // MIB)}, or {AUTO}"
            raise RuntimeError(f"migration.slot_mib is {config.slot_mib}, and a KV block has {shard} bytes: {least}")
    count = config.slots
    if count == AUTO:
        count = MAPPED_SLOTS if config.transport in MAPPED else SENT_SLOTS
    return StagingSizes(cache.workers, count, slot_bytes)


def make_slots(config: MigrationSettings, sizes: StagingSizes) -> Slots:
    """The staging slots of a replica's workers, in the memory that its transport needs; custom ones use host memory.

    On GPUs, each worker's slots are on its own GPU: vLLM gives the worker of rank i the i-th GPU of the replica.

    Raises:
        RuntimeError: the slots do not fit into memory, or there is no GPU.
    """
    ranks = range(sizes.workers)
    if config.transport in ON_GPU:
        return Slots(sizes.count, sizes.slot_bytes, [partial(DeviceSegment.create, device=rank) for rank in ranks])
    # Checked here, since the kernel allocates a page on its first use, and then ends a process for want of one.
    if sizes.memory > (free := free_host_memory()):
        raise RuntimeError(
            f"staging slots need {-(-sizes.memory // MIB)} MiB of memory, and {free // MIB} MiB are free: lower "
            "migration.slots or migration.slot_mib"
        )
    return Slots(sizes.count, sizes.slot_bytes, [HostSegment.create for _ in ranks])
