"""Transports of KV blocks by their names in the configuration, and the memory of their staging slots.

shared       host memory    replicas of one node map each other's slots
collective   host memory    sent through Ray collective groups over gloo
cuda_ipc     GPU memory     replicas of one node map each other's slots
nccl         GPU memory     sent through Ray collective groups over NCCL; every replica has a GPU of its own
"""

import importlib
from functools import partial

from deployments.config import ON_GPU, MigrationSettings
from migration.kv.device import DeviceSegment
from migration.kv.staging import HostSegment
from migration.protocol.ports import Transport
from migration.run.slots import Slots
from migration.transport.shared import SharedSlots

_THREADS = 8
"""Concurrent transfers of one worker's slots; each blocks a thread of the replica."""


def make_transport(config: MigrationSettings, workers: int) -> Transport:
    """The configured transport of a replica with `workers` workers.

    "module:attribute" names a custom factory, which is called with the settings.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such attribute.
    """
    match config.transport:
        case "shared":
            return SharedSlots()
        case "cuda_ipc":
            return SharedSlots("cuda_ipc", elsewhere="nccl")
        case "collective":
            from migration.transport import gloo_group
            from migration.transport.collective import CollectiveGroups

            gloo_group.register(config.transfer_timeout_s)
            return CollectiveGroups(gloo_group.BACKEND, config.transfer_timeout_s, workers * _THREADS)
        case "nccl":
            from migration.transport import nccl_group
            from migration.transport.collective import CollectiveGroups, DeviceMemory

            nccl_group.register(config.transfer_timeout_s)
            threads = workers * _THREADS
            return CollectiveGroups(nccl_group.BACKEND, config.transfer_timeout_s, threads, DeviceMemory())
    module, _, attribute = config.transport.partition(":")
    made: Transport = getattr(importlib.import_module(module), attribute)(config)
    return made


def make_slots(config: MigrationSettings, workers: int) -> Slots:
    """The staging slots of a replica's workers, in the memory that its transport needs; custom ones use host memory.

    On GPUs, each worker's slots are on its own GPU: vLLM gives the worker of rank i the i-th GPU of the replica.

    Raises:
        RuntimeError: the slots do not fit into GPU memory, or there is no GPU.
    """
    if config.transport in ON_GPU:
        creates = [partial(DeviceSegment.create, device=rank) for rank in range(workers)]
        return Slots(config.slots, config.slot_bytes, creates)
    return Slots(config.slots, config.slot_bytes, [HostSegment.create] * workers)
