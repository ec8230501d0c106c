"""Answers and errors of an endpoint."""

import pytest

from app.cli.endpoint import Endpoint
from app.cli.errors import Failed, NotThere
from app.ingress.errors import ApiError
from tests.app.cli.fake_mell import FakeMell, free_port
from tests.app.client.sample import BUSY, MOVED


def test_documents_come_as_they_are_and_as_values(url: str) -> None:
    with Endpoint(url + "/") as endpoint:
        assert endpoint.url == url
        assert endpoint.state().policy == "pack" and endpoint.state_document() == BUSY
        assert len(endpoint.migrations()) == len(MOVED["migrations"])
        assert endpoint.health() is None


def test_nobody_at_the_address() -> None:
    with (
        Endpoint(f"http://127.0.0.1:{free_port()}") as endpoint,
        pytest.raises(NotThere, match="is `serve run") as told,
    ):
        endpoint.state()
    assert told.value.status == 3 and "--url" in str(told.value)


def test_the_message_of_the_server_is_shown_as_it_is(url: str, mell: FakeMell) -> None:
    mell.refusal = ApiError(422, "the request cannot move: no", details={"candidates": [1]})
    with Endpoint(url) as endpoint, pytest.raises(Failed) as told:
        endpoint.move("r", None, "auto")
    assert str(told.value) == "the request cannot move: no"
    assert told.value.status == 1 and told.value.body["error"]["candidates"] == [1]


def test_a_call_without_the_admin_key_is_told_which_option_to_give(url: str, mell: FakeMell) -> None:
    mell.admin_key = "secret"
    with Endpoint(url) as endpoint, pytest.raises(Failed, match="--admin-key KEY, or set MELL_ADMIN_KEY"):
        endpoint.state()
    with Endpoint(url, "secret") as endpoint:
        assert endpoint.state().mode == "act"


def test_why_it_is_not_ready_is_its_health(url: str, mell: FakeMell) -> None:
    mell.refusal = ApiError(503, "starting")
    with Endpoint(url) as endpoint:
        assert endpoint.health() == "starting"


@pytest.mark.parametrize("document", [{"detail": "hello"}, BUSY | {"replicas": [{}]}])
def test_somebody_who_is_not_mell_is_nobody(url: str, mell: FakeMell, document: dict[str, object]) -> None:
    mell.state = document
    with Endpoint(url) as endpoint, pytest.raises(NotThere, match="not as Mell does"):
        endpoint.state()


def test_a_server_without_these_paths_is_not_mell(url: str) -> None:
    with Endpoint(f"{url}/nowhere") as endpoint, pytest.raises(NotThere, match="is not Mell"):
        endpoint.state()


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxy_without_mell_behind_it_is_nobody(url: str, mell: FakeMell, status: int) -> None:
    mell.refusal = ApiError(status, "bad gateway")
    with Endpoint(url) as endpoint, pytest.raises(NotThere, match="reaches no Mell: bad gateway"):
        endpoint.state()


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Endpoint(url) as endpoint:
        assert endpoint.state().mode == "act"


def test_an_id_cannot_lead_to_another_path(url: str, mell: FakeMell) -> None:
    with Endpoint(url) as endpoint:
        endpoint.drain("a?b")
        with pytest.raises(Failed, match="404"):
            endpoint.drain("../../x")
    assert mell.orders == ["a?b"]
