"""Chooses the lines that a user can act on, out of all that `serve run` and its cluster write; pure.

Ray, Ray Serve, vLLM and torch write some eighty lines before the first request, a third of them warnings that concern
nobody. All lines go to a file, and to the terminal these:

- errors and tracebacks of any process, with the lines that follow them,
- warnings of Mell and of Serve's controller,
- Mell's own lines: the progress of the start, and once it is ready all of them,
- whatever the command itself writes in no known form.

After a request to end, only Mell's own errors and warnings are left. Serve's verdict that the application cannot start
is noticed, since `serve run` would wait for ever.
"""

import re
from collections.abc import Iterator
from enum import Enum, IntEnum

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_SENDER = re.compile(r"\((?P<sender>[^()]*?)(?: pid=\d+)?(?:, ip=[^)]*)?\)(?: |$)")
"""Ray's prefix of a line of another process."""

_SERVE = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ (?P<time>[\d:]+),\d+ "
    r"(?P<component>\S+) (?P<id>\S+) -- (?P<text>.*)"
)
_RAY = re.compile(r"[\d-]+ [\d:,]+\s+(?P<level>DEBUG|INFO|SUCC|WARNING|ERROR|CRITICAL) \S+ -- (?P<text>.*)")
_CORE = re.compile(r"\[[^]]* (?P<level>[DIWEC]) \d+ \d+\] ")
_VLLM = re.compile(r"(\([^)]*\) )?(?P<level>ERROR|CRITICAL) [\d-]+ [\d:]+ ")
_TRACEBACK = "Traceback (most recent call last):"
_DASHBOARD = re.compile(r"View the dashboard at (?P<url>\S+)")

_TOKEN = "Token authentication is enabled"
_READY = "Mell is ready"
_PROGRESS = re.compile(rf"{_READY}|\d+ of \d+ engines? runs?")
"""Mell's lines about the progress of the start."""

_FAILED = re.compile(r"Failed to update the deployments|Deploying app '.*' failed")
"""The errors of Serve's controller that end the start of an application."""

LAST_ADDRESS = "  live page  "
"""The beginning of the last line of Mell's addresses. The address of Ray's dashboard, which only Ray knows, follows."""

_PLAIN = ("", "raylet")
"""The senders whose lines are shown in any form: the command itself, and the raylet."""

_NOISE = re.compile(
    r"Cannot deregister autoscaling state|has \d+ replicas that have taken more than|Started <ray\.serve\."
)
"""Lines of Ray Serve in the form of warnings or of Mell's own lines."""


class _Severity(IntEnum):
    NOTE, WARNING, ERROR = range(3)


_SEVERITIES = {"WARNING": _Severity.WARNING} | dict.fromkeys(("ERROR", "CRITICAL", "E", "C"), _Severity.ERROR)


class _Reach(Enum):
    """The lines without a form that belong to the shown line before them."""

    NONE = "none"
    INDENTED = "the indented ones"
    TRACEBACK = "all up to the exception, which is the first one that is not indented"
    ALL = "all"


class Console:
    """Chooses lines, in the order in which they are written."""

    def __init__(self) -> None:
        self.is_ready = False
        self.has_failed = False
        """True once Serve has given the application up before it was ready, and before an end was requested."""
        self.ends = False
        """Set by the owner, once an end is requested."""
        self._dashboard = ""
        self._has_token = False
        self._reach: dict[str, _Reach] = {}
        """By the sender of lines."""

    def choose(self, line: str) -> Iterator[str]:
        """The lines to show for the next line that was written."""
        line = _COLORS.sub("", line).strip("\r").rstrip()
        found = _SENDER.match(line)
        sender, text = (found["sender"], line[found.end() :]) if found else ("", line)
        text = text.rpartition("\r")[2]  # Of a progress bar, its last state.
        if serve := _SERVE.match(text):
            yield from self._of_serve(sender, serve)
        elif other := _RAY.match(text) or _CORE.match(text) or _VLLM.match(text):
            yield from self._of_others(sender, other["level"], text)
        else:
            yield from self._without_form(sender, text)

    def _of_serve(self, sender: str, line: re.Match[str]) -> Iterator[str]:
        """A line of Mell, or of Ray Serve."""
        severity, text = _SEVERITIES.get(line["level"], _Severity.NOTE), line["text"]
        ours = line["component"].startswith("mell_")
        progress = ours and severity is _Severity.NOTE and _PROGRESS.match(text) is not None
        if self.ends:
            shown = ours and severity > _Severity.NOTE
        else:
            shown = severity > _Severity.NOTE or progress or (ours and self.is_ready)
        shown = shown and _NOISE.search(text) is None
        self._begin(sender, severity, shown)
        if severity is _Severity.ERROR and line["component"] == "controller" and not (self.is_ready or self.ends):
            self.has_failed |= _FAILED.match(text) is not None
        if shown:
            self.is_ready |= progress and text.startswith(_READY)
            level = "" if severity is _Severity.NOTE else f"{line['level']} "
            component = line["component"].removeprefix("mell_")
            yield text if progress else f"{line['time']} {level}{component} {line['id']}: {text}"

    def _of_others(self, sender: str, level: str, text: str) -> Iterator[str]:
        """A line of Ray's own processes, or an error of vLLM's."""
        severity = _SEVERITIES.get(level, _Severity.NOTE)
        self._begin(sender, severity, shown := severity is _Severity.ERROR and not self.ends)
        self._has_token |= _TOKEN in text
        if dashboard := _DASHBOARD.search(text):
            self._dashboard = dashboard["url"]
            yield "Ray runs; the application starts"
        elif level == "SUCC":
            yield "the application is submitted; its engines start"
        elif shown:
            yield text

    def _without_form(self, sender: str, text: str) -> Iterator[str]:
        reach = self._reach.get(sender, _Reach.NONE)
        follows = not text or text[0].isspace()
        if text == _TRACEBACK:
            shown, reach = True, reach if reach is _Reach.ALL else _Reach.TRACEBACK
        elif follows or reach is _Reach.ALL:
            shown = reach is not _Reach.NONE
        else:
            shown = reach is _Reach.TRACEBACK or sender in _PLAIN
            reach = _Reach.INDENTED if shown else _Reach.NONE
        self._reach[sender] = reach
        if shown and text and not self.ends:
            yield text
            if text.startswith(LAST_ADDRESS) and self._dashboard:
                token = ", with the token that `.venv/bin/ray get-auth-token` prints" if self._has_token else ""
                yield f"  dashboard  {self._dashboard} (Ray's{token})"

    def _begin(self, sender: str, severity: _Severity, shown: bool) -> None:
        whole = severity is _Severity.ERROR
        self._reach[sender] = _Reach.NONE if not shown else _Reach.ALL if whole else _Reach.INDENTED
