"""Which transport a name stands for."""

import pytest

from deployments.config import MigrationConfig
from deployments.transports import NAMES, make_transport
from migration.errors import TransferFailed
from migration.messages import SlotRef
from migration.transport.collective import CollectiveGroups
from migration.transport.shared import SharedSlots
from policies.model import Bytes


def factory(config: MigrationConfig) -> SharedSlots:
    """A transport of one's own."""
    assert config.slots == 7
    return SharedSlots()


def test_shared_is_the_default() -> None:
    assert isinstance(make_transport(MigrationConfig()), SharedSlots)


def test_collective_is_made_without_a_group() -> None:
    transport = make_transport(MigrationConfig(transport="collective"))
    assert isinstance(transport, CollectiveGroups) and not transport.shares_slots


def test_every_name_makes_a_transport() -> None:
    assert all(make_transport(MigrationConfig(transport=name)) for name in NAMES)


def test_a_factory_of_ones_own_is_given_the_configuration() -> None:
    config = MigrationConfig(transport=f"{__name__}:factory", slots=7)
    assert isinstance(make_transport(config), SharedSlots)


@pytest.mark.parametrize("name", ["", "nccl", "Shared", "tests.deployments"])
def test_an_unknown_name_says_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=r"shared.*collective.*module:factory"):
        make_transport(MigrationConfig(transport=name))


@pytest.mark.parametrize(
    ("name", "error"),
    [("no.such.module:factory", ModuleNotFoundError), (f"{__name__}:nothing", AttributeError)],
    ids=["no module", "no attribute"],
)
def test_a_factory_that_is_not_there_is_an_error(name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        make_transport(MigrationConfig(transport=name))


async def test_slots_of_another_node_are_not_read() -> None:
    with pytest.raises(TransferFailed, match=r"set migration\.transport to collective"):
        await SharedSlots().receive("another node", SlotRef("/proc/1/fd/3", 0, 1), Bytes(64), None)
