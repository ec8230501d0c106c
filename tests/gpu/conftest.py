"""Everything here is marked `gpu`, and skipped with the reason where there are too few GPUs."""

from pathlib import Path

import pytest


def devices() -> tuple[int, str]:
    """How many GPUs there are, and why not more."""
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
    """Mark, and skip: one GPU is needed, two for modules named test_two_*."""
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    if not own:
        return
    count, reason = devices()
    for item in own:
        item.add_marker(pytest.mark.gpu)
        needed = 2 if item.path.stem.startswith("test_two") else 1
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs CUDA devices: {needed}; {reason}"))
