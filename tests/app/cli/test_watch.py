"""A notice becomes one order to drain the node. Each look is followed by the next action of the stage."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.cli.endpoint import MellEndpoint
from app.cli.watch import METADATA_URL, Cloud, source_of, watch
from app.ingress.errors import ApiError
from tests.app.cli.conftest import Stage
from tests.app.cli.fake_mell import FakeMell, free_port, serving
from tests.app.cli.fake_metadata import FakeMetadata
from tests.app.cli.test_notices import AT

NOW = AT - 120.0
TIMES = {Cloud.EC2: "2026-11-28T12:00:00Z", Cloud.GCE: "", Cloud.AZURE: "Sat, 28 Nov 2026 12:00:00 GMT"}
LEFT_S = {Cloud.EC2: 120.0, Cloud.GCE: 30.0, Cloud.AZURE: 120.0}
Action = Callable[[], object]


def nothing() -> None:
    """No change between two looks."""


@pytest.fixture
def metadata() -> FakeMetadata:
    return FakeMetadata()


@pytest.fixture
def metadata_url(metadata: FakeMetadata) -> Iterator[str]:
    with serving(metadata) as found:
        yield found


def watched(cloud: Cloud, at: str, url: str, *then: Action, file: Path | None = None, as_json: bool = False) -> str:
    """The output of a watch that looks once before each action, and once more."""
    stage = Stage(as_json)
    stage.then = list(then)
    notices = source_of(cloud, at, file, lambda: NOW)
    with notices as source, MellEndpoint(url) as endpoint, pytest.raises(KeyboardInterrupt):
        watch(endpoint, stage.terminal, "gpu-a", source, lambda: NOW)
    assert stage.then == []
    return stage.text


CLOUDS = pytest.mark.parametrize("cloud", [Cloud.EC2, Cloud.GCE, Cloud.AZURE])


@CLOUDS
def test_without_a_notice_nothing_is_ordered(cloud: Cloud, metadata_url: str, url: str, mell: FakeMell) -> None:
    text = watched(cloud, metadata_url, url, nothing, nothing)
    assert mell.orders == [] and text == "watching for a notice that gpu-a ends\n"


@CLOUDS
def test_a_notice_is_one_order_with_its_deadline(
    cloud: Cloud, metadata: FakeMetadata, metadata_url: str, url: str, mell: FakeMell
) -> None:
    mell.draining, mell.on_nodes = ["n1"], ["a"]
    text = watched(cloud, metadata_url, url, lambda: setattr(metadata, "time", TIMES[cloud]), nothing, nothing)
    assert mell.orders == [("gpu-a", {"within_s": LEFT_S[cloud]})]
    assert text.splitlines()[1:] == [f"gpu-a ends in {LEFT_S[cloud]:g} s: 1 replica will be replaced elsewhere"]


@CLOUDS
def test_a_service_that_fails_is_named_once_and_asked_again(
    cloud: Cloud, metadata: FakeMetadata, metadata_url: str, url: str, mell: FakeMell
) -> None:
    def recover() -> None:
        metadata.broken, metadata.time = False, TIMES[cloud]

    metadata.broken = True
    text = watched(cloud, metadata_url, url, nothing, nothing, recover, nothing)
    assert len(mell.orders) == 1
    _, trouble, order = text.splitlines()
    assert trouble.startswith("no answer on notices: Server error '503") and order.startswith("gpu-a ends")


def test_a_service_that_is_away_comes_back(metadata: FakeMetadata, url: str, mell: FakeMell) -> None:
    metadata.time, port = TIMES[Cloud.EC2], free_port()
    with ExitStack() as later:
        start = [nothing, lambda: later.enter_context(serving(metadata, port)), nothing]
        text = watched(Cloud.EC2, f"http://127.0.0.1:{port}", url, *start)
    assert len(mell.orders) == 1 and text.count("no answer on notices: ") == 1


def test_a_refused_order_is_repeated(metadata: FakeMetadata, metadata_url: str, url: str, mell: FakeMell) -> None:
    metadata.time = TIMES[Cloud.EC2]
    mell.refusal = ApiError(503, "the scheduler does not answer", code="unavailable")
    text = watched(Cloud.EC2, metadata_url, url, nothing, lambda: setattr(mell, "refusal", None), nothing)
    assert mell.orders == [("gpu-a", {"within_s": 120.0})] * 3
    assert text.count("the scheduler does not answer") == 1 and text.count("gpu-a ends in") == 1


def test_a_wrong_key_shows_before_a_notice(metadata_url: str, url: str, mell: FakeMell) -> None:
    mell.admin_key = "secret"
    assert "give --admin-key KEY" in watched(Cloud.EC2, metadata_url, url).splitlines()[1]


def test_a_file_that_appears_is_a_notice_each_time(tmp_path: Path, url: str, mell: FakeMell) -> None:
    file = tmp_path / "notice"
    then = [file.touch, nothing, file.unlink, lambda: file.write_text("2026-11-28T12:00:00Z"), nothing]
    text = watched(Cloud.FILE, METADATA_URL, url, *then, file=file)
    assert mell.orders == [("gpu-a", {"within_s": None}), ("gpu-a", {"within_s": 120.0})]
    assert "gpu-a ends: 0 replicas" in text


def test_json_has_one_document_per_order_or_trouble(tmp_path: Path, url: str, mell: FakeMell) -> None:
    mell.draining, mell.on_nodes = ["n1"], ["a"]
    (file := tmp_path / "notice").mkdir()
    then: list[Action] = [nothing, file.rmdir, file.touch, nothing]
    lines = watched(Cloud.FILE, METADATA_URL, url, *then, file=file, as_json=True).splitlines()
    trouble, order = map(json.loads, lines)
    assert "Is a directory" in trouble["error"]["message"]
    assert order == {"nodes": ["n1"], "replicas": ["a"], "within_s": None}
