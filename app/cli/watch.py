"""`mell node watch`: a cloud's notice that this machine ends becomes a drain of its node."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import httpx
from rich.text import Text

from app.cli.endpoint import MellEndpoint
from app.cli.errors import CliError
from app.cli.formatting import plural
from app.cli.notices import Notice, parse_azure, parse_ec2, parse_file, parse_gce
from app.cli.terminal import Terminal

METADATA_URL = "http://169.254.169.254"
"""The metadata service of each of the clouds, seen from a machine."""
INTERVAL_S = 2.0
"""Interval of looks for a notice; the shortest notices are of 30 s."""
_TIMEOUT_S = 5.0

NoticeSource = Callable[[], Notice | None]
"""Looks for a notice. Raises httpx.HTTPError, OSError or ValueError without an answer, or with one of another form."""


class Cloud(StrEnum):
    """Where notices come from."""

    EC2 = "ec2"
    GCE = "gce"
    AZURE = "azure"
    FILE = "file"


@contextmanager
def source_of(
    cloud: Cloud, metadata_url: str, file: Path | None, clock: Callable[[], float] = time.time
) -> Iterator[NoticeSource]:
    """The source of a cloud, or of the file. `clock` is in seconds since 1970."""
    # The address is of this machine alone: the environment's proxies do not reach it.
    with httpx.Client(base_url=metadata_url, timeout=_TIMEOUT_S, trust_env=False) as http:
        match cloud:
            case Cloud.EC2:
                yield lambda: _ec2(http)
            case Cloud.GCE:
                yield lambda: parse_gce(_text(http, "/computeMetadata/v1/instance/preempted", _GOOGLE), clock())
            case Cloud.AZURE:
                yield lambda: _azure(http)
            case Cloud.FILE:
                assert file is not None
                yield lambda: parse_file(file.read_text("utf-8")) if file.exists() else None


_GOOGLE = {"Metadata-Flavor": "Google"}
_AZURE = {"Metadata": "true"}


def _text(http: httpx.Client, path: str, headers: dict[str, str]) -> str:
    return http.get(path, headers=headers).raise_for_status().text


def _ec2(http: httpx.Client) -> Notice | None:
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = http.put("/latest/api/token", headers=lifetime).raise_for_status().text
    answer = http.get("/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token})
    return None if answer.status_code == httpx.codes.NOT_FOUND else parse_ec2(answer.raise_for_status().text)


def _azure(http: httpx.Client) -> Notice | None:
    machine = _text(http, "/metadata/instance/compute/name?api-version=2021-02-01&format=text", _AZURE)
    return parse_azure(_text(http, "/metadata/scheduledevents?api-version=2020-07-01", _AZURE), machine.strip())


def watch(
    endpoint: MellEndpoint,
    terminal: Terminal,
    node: str,
    source: NoticeSource,
    clock: Callable[[], float] = time.time,
) -> None:
    """Order a drain of the node for each notice, once, until interrupted.

    What fails is tried again, and shown once. A notice that goes away, and comes again, is another one.
    """
    _show(terminal, f"watching for a notice that {node} ends")
    shown = _trouble(terminal, "", endpoint.state)  # An address or a key that is wrong shows before it is needed.
    ordered = False

    def look() -> None:
        nonlocal ordered
        notice = source()
        if notice is None:
            ordered = False
        elif not ordered:
            _order(endpoint, terminal, node, notice.left_s(clock()))
            ordered = True

    while True:
        shown = _trouble(terminal, shown, look)
        terminal.sleep(INTERVAL_S)


def _trouble(terminal: Terminal, shown: str, call: Callable[[], object]) -> str:
    """Make the call; the reason why it failed, empty if it did not. Shows a reason that is not the one `shown` last."""
    try:
        call()
    except CliError as error:
        trouble = str(error)
    except (httpx.HTTPError, OSError, ValueError) as error:
        # httpx adds a second line, on where to read about the status.
        trouble = f"no answer on notices: {str(error).splitlines()[0] if str(error) else repr(error)}"
    else:
        return ""
    if trouble != shown:
        _show(terminal, trouble)
        terminal.write({"error": {"message": trouble}})
    return trouble


def _order(endpoint: MellEndpoint, terminal: Terminal, node: str, left_s: float | None) -> None:
    """Order that the node be drained within the time that is left."""
    answer = endpoint.drain_node(node, left_s)
    when = "" if left_s is None else f" in {left_s:g} s"
    _show(terminal, f"{node} ends{when}: {plural(len(answer['replicas']), 'replica')} will be replaced elsewhere")
    terminal.write({**answer, "within_s": left_s})


def _show(terminal: Terminal, line: str) -> None:
    """Write one line, however long it is."""
    terminal.show(Text(" ".join(line.split())), wraps=False)
