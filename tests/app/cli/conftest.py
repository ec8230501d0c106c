"""A terminal with a manual clock, and a fake endpoint."""

import io
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console, RenderableType

from app.cli.terminal import Terminal
from tests.app.cli.fake_mell import FakeMell, serving


class Stage:
    """A terminal of 100 columns; each sleep runs the next action of `then`, or raises KeyboardInterrupt."""

    def __init__(self, as_json: bool = False) -> None:
        self.now_s = 0.0
        self.then: list[Callable[[], object]] = []
        self._out = io.StringIO()
        console = Console(file=self._out, width=100, height=30, highlight=False)
        self.terminal = Terminal(as_json, console, lambda: self.now_s, self._sleep)

    @property
    def text(self) -> str:
        """The output so far."""
        return self._out.getvalue()

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if not self.then:
            raise KeyboardInterrupt
        self.then.pop(0)()


@pytest.fixture
def mell() -> FakeMell:
    """The fake behind `url`."""
    return FakeMell()


@pytest.fixture
def url(mell: FakeMell) -> Iterator[str]:
    """The URL of the fake endpoint."""
    with serving(mell) as found:
        yield found


@pytest.fixture(autouse=True)
def no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests ignore the environment of the user who runs them."""
    for name in ("MELL_URL", "MELL_ADMIN_KEY", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def drawn(shown: RenderableType, width: int = 80, encoding: str = "utf-8") -> str:
    """The output at `width` columns, without colours and trailing blanks."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, width=width, highlight=False, color_system=None)
    console.print(shown)
    out.seek(0)
    return "\n".join(line.rstrip() for line in out.read().splitlines())
