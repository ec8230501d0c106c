"""Every member of the fake of CuPy exists in CuPy. Needs CuPy, but no GPU."""

import inspect
from operator import attrgetter
from typing import Any

import pytest

from tests.migration import fake_cupy

cupy = pytest.importorskip("cupy", reason="CuPy is installed with make setup DEVICE=cuda")
pytest.importorskip("cupy.cuda.nccl")


OWN = {"free_bytes", "mapped", "changed", "ids", "made", "waiting", "error", "known", "apart", "current"}
"""Members for tests, which CuPy does not have."""


def public(thing: Any) -> set[str]:
    """The public names of a module or class."""
    return {name for name in {*vars(thing), *vars(type(thing))} if not name.startswith("_")} - OWN


@pytest.mark.parametrize("path", ["", "cuda", "cuda.runtime", "cuda.nccl"])
def test_faked_names_exist_in_cupy(path: str) -> None:
    with fake_cupy.installed() as fake:
        names = public(attrgetter(path)(fake) if path else fake)
    assert names and not names - set(dir(attrgetter(path)(cupy) if path else cupy))


@pytest.mark.parametrize("name", ["Stream", "Device"])
def test_faked_members_exist_in_cupy(name: str) -> None:
    assert not public(getattr(fake_cupy, name)) - {"mro"} - set(dir(getattr(cupy.cuda, name)))


def test_faked_communicator_members_exist_in_cupy() -> None:
    members = public(fake_cupy.Nccl().NcclCommunicator) - {"mro"}
    assert not members - set(dir(cupy.cuda.nccl.NcclCommunicator))


def test_unique_id_has_cupys_type_and_length() -> None:
    unique_id = cupy.cuda.nccl.get_unique_id()
    assert type(unique_id) is type(fake_cupy.Nccl().get_unique_id()) and len(unique_id) == 128


def test_unowned_memory_takes_the_same_arguments() -> None:
    text = cupy.cuda.UnownedMemory.__doc__ or ""
    with fake_cupy.installed() as fake:
        names = list(inspect.signature(fake.cuda.UnownedMemory).parameters)
    assert all(name in text.splitlines()[0] for name in names)
