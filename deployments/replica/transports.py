"""Which transport carries KV blocks, by its name in the configuration, and where the staging slots for it are.

shared       host memory    replicas of one node map each other's slots
collective   host memory    sent through Ray collective groups over gloo
cuda_ipc     GPU memory     replicas of one node map each other's slots
nccl         GPU memory     sent through Ray collective groups over NCCL; every replica has a GPU of its own
"""

import importlib

from deployments.config import ON_GPU, MigrationSettings
from migration.kv.device import DeviceSegment
from migration.kv.staging import HostSegment
from migration.protocol.ports import Transport
from migration.run.slots import Slots
from migration.transport.shared import SharedSlots


def make_transport(config: MigrationSettings) -> Transport:
    """The transport of that name; "module:attribute" names a custom factory, which is called with the settings.

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
            return CollectiveGroups(gloo_group.BACKEND, config.transfer_timeout_s)
        case "nccl":
            from migration.transport import nccl_group
            from migration.transport.collective import CollectiveGroups, DeviceMemory

            nccl_group.register(config.transfer_timeout_s)
            return CollectiveGroups(nccl_group.BACKEND, config.transfer_timeout_s, memory=DeviceMemory())
    module, _, attribute = config.transport.partition(":")
    made: Transport = getattr(importlib.import_module(module), attribute)(config)
    return made


def make_slots(config: MigrationSettings) -> Slots:
    """A replica's staging slots, where its transport wants them; a factory of your own gets them in host memory.

    Raises:
        RuntimeError: they are to be in GPU memory, and there is none, or not enough.
    """
    create = DeviceSegment.create if config.transport in ON_GPU else HostSegment.create
    return Slots(config.slots, config.slot_bytes, create)
