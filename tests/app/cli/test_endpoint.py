"""Answers and errors of an endpoint."""

import pytest

from app.cli.endpoint import MellEndpoint
from app.cli.errors import Failed, NotThere
from app.ingress.errors import ApiError
from tests.app.cli.fake_mell import FakeMell, free_port
from tests.app.client.sample import BUSY, MOVED


def test_documents_and_their_values(url: str) -> None:
    with MellEndpoint(url + "/") as endpoint:
        assert endpoint.url == url
        assert endpoint.state().policy == "pack" and endpoint.state_document() == BUSY
        assert len(endpoint.migrations()) == len(MOVED["migrations"])
        assert endpoint.health() is None


def test_no_server_at_the_address() -> None:
    with (
        MellEndpoint(f"http://127.0.0.1:{free_port()}") as endpoint,
        pytest.raises(NotThere, match="is Mell running there") as raised,
    ):
        endpoint.state()
    assert raised.value.status == 3 and "--url" in str(raised.value)


def test_the_servers_message_is_shown_unchanged(url: str, mell: FakeMell) -> None:
    mell.refusal = ApiError(422, "the request cannot move: no", details={"candidates": [1]})
    with MellEndpoint(url) as endpoint, pytest.raises(Failed) as raised:
        endpoint.move("r", None, "auto")
    assert str(raised.value) == "the request cannot move: no"
    assert raised.value.status == 1 and raised.value.body["error"]["candidates"] == [1]


def test_a_call_without_the_admin_key_names_the_option(url: str, mell: FakeMell) -> None:
    mell.admin_key = "secret"
    with MellEndpoint(url) as endpoint, pytest.raises(Failed, match="--admin-key KEY, or set MELL_ADMIN_KEY"):
        endpoint.state()
    with MellEndpoint(url, "secret") as endpoint:
        assert endpoint.state().mode == "act"


def test_health_is_the_reason_for_not_being_ready(url: str, mell: FakeMell) -> None:
    mell.refusal = ApiError(503, "starting")
    with MellEndpoint(url) as endpoint:
        assert endpoint.health() == "starting"


@pytest.mark.parametrize("document", [{"detail": "hello"}, BUSY | {"replicas": [{}]}])
def test_another_server_is_not_mell(url: str, mell: FakeMell, document: dict[str, object]) -> None:
    mell.state = document
    with MellEndpoint(url) as endpoint, pytest.raises(NotThere, match="not as Mell does"):
        endpoint.state()


def test_a_server_without_these_paths_is_not_mell(url: str) -> None:
    with MellEndpoint(f"{url}/nowhere") as endpoint, pytest.raises(NotThere, match="is not Mell"):
        endpoint.state()


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxy_without_mell_behind_it_is_not_mell(url: str, mell: FakeMell, status: int) -> None:
    mell.refusal = ApiError(status, "bad gateway")
    with MellEndpoint(url) as endpoint, pytest.raises(NotThere, match="cannot reach Mell: bad gateway"):
        endpoint.state()


def test_the_environments_proxy_is_not_used_for_loopback(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with MellEndpoint(url) as endpoint:
        assert endpoint.state().mode == "act"


def test_an_id_cannot_lead_to_another_path(url: str, mell: FakeMell) -> None:
    with MellEndpoint(url) as endpoint:
        endpoint.drain("a?b")
        with pytest.raises(Failed, match="404"):
            endpoint.drain("../../x")
    assert mell.orders == ["a?b"]
