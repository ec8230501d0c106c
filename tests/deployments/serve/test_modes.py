"""The store of the ordered mode, over a dictionary in the place of Ray's."""

import pytest

from deployments.serve.modes import ModeOrder, ServeModeStore
from policies.decision.limits import Mode
from tests.ray_store import replace_store


@pytest.mark.parametrize("order", [ModeOrder(Mode.OFF, 1795782952.25), ModeOrder(Mode.ACT, None)])
def test_the_newest_order_is_kept_by_application(monkeypatch: pytest.MonkeyPatch, order: ModeOrder) -> None:
    replace_store(monkeypatch)
    ServeModeStore("mell").write(ModeOrder(Mode.OBSERVE, 1.0))
    ServeModeStore("mell").write(order)
    assert ServeModeStore("mell").read() == order and ServeModeStore("other").read() is None
