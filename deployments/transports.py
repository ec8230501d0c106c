"""Which transport carries KV blocks, by its name in the configuration."""

import importlib

from deployments.config import MigrationConfig
from migration.ports import Transport
from migration.transport.shared import SharedSlots

NAMES = ("shared", "collective")


def make_transport(config: MigrationConfig) -> Transport:
    """The transport of that name; "module:attribute" names a factory of your own.

    Raises:
        ValueError: there is no such transport.
    """
    if config.transport == "shared":
        return SharedSlots()
    if config.transport == "collective":
        from migration.transport import gloo_group
        from migration.transport.collective import CollectiveGroups

        gloo_group.register(config.transfer_timeout_s)
        return CollectiveGroups(gloo_group.BACKEND, config.transfer_timeout_s)
    module, _, attribute = config.transport.partition(":")
    if not attribute:
        raise ValueError(f"unknown transport {config.transport!r}: use one of {NAMES} or module:factory")
    made: Transport = getattr(importlib.import_module(module), attribute)(config)
    return made
