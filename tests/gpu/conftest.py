"""Marks all tests here `gpu`, and skips them, with the reason, if there are too few GPUs."""

from pathlib import Path

import pytest


def devices() -> tuple[int, str]:
    """The number of GPUs, and the reason for none."""
    try:
        import cupy
    except ImportError as error:
        return 0, f"CuPy cannot be imported ({error})"
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return 0, str(error)
    return count, f"this machine has {count}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark, and skip if there are too few GPUs: two for modules named test_two_*, else one."""
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    if not own:
        return
    count, reason = devices()
    for item in own:
        item.add_marker(pytest.mark.gpu)
        needed = 2 if item.path.stem.startswith("test_two") else 1
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs CUDA devices: {needed}; {reason}"))
