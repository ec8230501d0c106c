"""The command line as a whole, against an endpoint on loopback."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli.__main__ import app
from app.cli.terminal import Terminal
from app.ingress.errors import ApiError
from app.ingress.http.orders import CopyPrompt, DropOrder, MatchOrder, MoveRequest, PinOrder, parse_order
from app.versions import VERSION
from migration.protocol.record import Outcome
from tests.app.cli.fake_mell import FakeMell, free_port
from tests.app.client.sample import BUSY, MATCHED, SHARING, record

Mell = Callable[..., Result]


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="mell", env=environment)


@pytest.fixture
def at(url: str) -> Mell:
    """Runs a command against the endpoint."""
    return lambda *arguments: run(*arguments, "--url", url)


def test_status_shows_replicas_and_migrations(at: Mell) -> None:
    result = at("status")
    assert result.exit_code == 0
    assert "aaaaaaaa  RUNNING" in result.stdout and "1 committed, 1 aborted, 1 under way" in result.stdout


def test_status_as_json_is_the_document(at: Mell, mell: FakeMell) -> None:
    mell.state = BUSY | {"of a newer version": 1}
    assert json.loads(at("status", "--json").stdout) == mell.state


def test_url_and_key_from_the_environment(url: str, mell: FakeMell) -> None:
    mell.admin_key = "secret"
    assert run("status", MELL_URL=url, MELL_ADMIN_KEY="secret").exit_code == 0
    refused = run("status", MELL_URL=url)
    assert refused.exit_code == 1 and "--admin-key" in refused.stderr and refused.stdout == ""


def test_migrations_are_listed_newest_first(at: Mell, mell: FakeMell) -> None:
    lines = at("migrations", "--last", "2").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", "01234567", "11234567", "the"]
    listed = json.loads(at("migrations", "--json", "--last", "2").stdout)
    assert listed == {"migrations": mell.migrations["migrations"][:2]}


def test_a_timeline_is_written_to_its_file(at: Mell, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    result = at("timeline", str(file))
    assert result.exit_code == 0 and result.stdout.startswith("2 migrations in")
    assert {event["ph"] for event in json.loads(file.read_text())} == {"M", "X"}
    assert json.loads(at("timeline", str(file), "--json").stdout) == {"file": str(file), "migrations": 2}
    refused = at("timeline", str(tmp_path / "nowhere" / "timeline.json"))
    assert refused.exit_code == 1 and "cannot be written" in refused.stderr


def test_an_order_to_move_has_its_arguments(at: Mell, mell: FakeMell) -> None:
    result = at("move", "demo", "bbbbbbbb", "--path", "tokens", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"id": "0123456789abcdef"})
    assert at("move", "demo").exit_code == 0
    assert mell.orders == [
        {"request_id": "demo", "target": "bbbbbbbb", "path": "tokens"},
        {"request_id": "demo", "path": "auto"},
    ]
    assert [parse_order(MoveRequest, json.dumps(order).encode()).path for order in mell.orders] == ["tokens", "auto"]


def test_a_wait_for_a_move_shows_its_outcome(at: Mell, mell: FakeMell) -> None:
    result = at("move", "demo", "--wait")
    assert result.exit_code == 0 and "committed, paused 6.6 ms" in result.stdout
    mell.migrations = {"migrations": [record("0123456789abcdef", Outcome.ABORTED, error="the target died")]}
    result = at("move", "demo", "--wait")
    assert result.exit_code == 1 and "aborted: the target died" in result.stderr


def test_a_refused_order_shows_the_servers_message(at: Mell, mell: FakeMell) -> None:
    mell.refusal = ApiError(409, "2 requests are called 'demo'", details={"candidates": ["a", "b"]})
    result = at("move", "demo")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "mell: 2 requests are called 'demo'\n")
    result = at("move", "demo", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["error"]["candidates"] == ["a", "b"]


def test_an_order_to_drain_names_the_replica(at: Mell, mell: FakeMell) -> None:
    result = at("drain", "aaaaaaaa", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"id": "aaaaaaaa", "state": "DRAINING"})
    assert mell.orders == ["aaaaaaaa"]


def test_an_order_to_drain_a_node_names_it_or_this_one(at: Mell, mell: FakeMell) -> None:
    result = at("node", "drain", "gpu-a", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"nodes": [], "replicas": []})
    assert at("node", "drain", "--self", "--wait", "150").exit_code == 0
    assert mell.orders == [("gpu-a", {"within_s": None}), (socket.gethostname(), {"within_s": 150.0})]
    assert [at("node", "drain", *words).exit_code for words in ([], ["gpu-a", "--self"])] == [2, 2]


def test_a_hand_over_is_ordered_shown_and_undone(at: Mell, mell: FakeMell) -> None:
    to = "http://new:8000"
    assert at("hand-over", "--to", to).stdout == f"to {to}: 2 requests here, 0 there\n"
    assert json.loads(at("hand-over", "--json").stdout)["to"] == to
    assert at("hand-over", "--to", to, "--to-admin-key", "their-key").exit_code == 0
    assert at("hand-over", "--to", to, "--admin-key", "our-key").exit_code == 0
    assert [order["admin_key"] for order in mell.orders] == [None, "their-key", "our-key"]
    assert at("hand-over", "--undo").stdout == "no hand-over: 2 requests here, 0 there\n"
    assert [at("hand-over", *words).exit_code for words in (["--to", "no-url"], ["--undo", "--to", to])] == [2, 2]


def test_an_order_sets_the_bounds(at: Mell, mell: FakeMell) -> None:
    order = {"min_replicas": 1, "max_replicas": 3}
    assert at("bounds", "1", "3").stdout == "at least 1 replica, at most 3\n"
    assert json.loads(at("bounds", "1", "3", "--json").stdout) == order
    assert mell.orders == [order, order] and at("bounds", "few", "3").exit_code == 2
    assert at("bounds", "1", "3", "--model", "chat").exit_code == 0 and mell.orders[-1] == order | {"model": "chat"}


def test_an_order_sets_a_level(at: Mell, mell: FakeMell) -> None:
    assert at("level", "--ttft-p99", "1.5").stdout == "class default: first tokens within 1.5 s, for 99 %\n"
    shown = at("level", "--class", "chat", "--ttft-p99", "2", "--itl-p99", "40").stdout
    assert shown == "class chat: first tokens within 2 s, others within 40 ms, for 99 %\n"
    assert mell.orders == [
        {"class": "default", "ttft_p99_s": 1.5},
        {"class": "chat", "ttft_p99_s": 2.0, "itl_p99_ms": 40.0},
    ]
    assert at("level", "--ttft-p99", "2", "--model", "code").exit_code == 0
    assert mell.orders[-1] == {"class": "default", "ttft_p99_s": 2.0, "model": "code"}


@pytest.mark.parametrize(("role", "given"), [("prefill", "prefill"), ("both", "both"), ("auto", None)])
def test_an_order_for_a_role_names_the_replica(at: Mell, mell: FakeMell, role: str, given: str | None) -> None:
    result = at("role", "aaaaaaaa", role, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"id": "aaaaaaaa", "role": given})
    assert mell.orders == [("aaaaaaaa", {"role": given})]
    assert at("role", "aaaaaaaa", "decode").stdout == "aaaaaaaa: its role is decode\n"
    assert at("role", "aaaaaaaa", "auto").stdout == "aaaaaaaa: Mell assigns its role\n"
    assert at("role", "aaaaaaaa", "writer").exit_code == 2


@pytest.mark.parametrize(
    ("blocks", "given", "shown"),
    [("1500", 1500, "its KV pool gets 1,500 blocks"), ("auto", None, "Mell sizes its KV pool")],
)
def test_an_order_for_memory_names_the_replica(
    at: Mell, mell: FakeMell, blocks: str, given: int | None, shown: str
) -> None:
    result = at("memory", "aaaaaaaa", "--blocks", blocks, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"id": "aaaaaaaa", "blocks": given})
    assert mell.orders == [("aaaaaaaa", {"blocks": given})]
    assert at("memory", "aaaaaaaa", "--blocks", blocks).stdout == f"aaaaaaaa: {shown}\n"


def test_a_model_or_a_replica_sleeps_and_wakes(at: Mell, mell: FakeMell) -> None:
    assert at("sleep", "chat").stdout == "chat: falls asleep once its requests have left\n"
    assert json.loads(at("wake", "aaaaaaaa", "--json").stdout) == {"id": "aaaaaaaa", "asleep": False}
    assert mell.orders == [("models", "chat", "sleep"), ("replicas", "aaaaaaaa", "wake")]


@pytest.mark.parametrize(
    "given", [("--blocks", "9"), ("a", "--blocks", "1.5"), ("a", "--blocks", "0"), ("a", "--blocks", "all")]
)
def test_an_order_for_memory_is_checked(at: Mell, mell: FakeMell, given: tuple[str, ...]) -> None:
    assert at("memory", *given).exit_code == 2 and not mell.orders


def test_memory_of_replicas_is_shown(at: Mell, mell: FakeMell) -> None:
    assert at("memory").stderr == "mell: KV pools keep their sizes: memory.budget_mib is not set\n"
    sizes = {"blocks": 2000, "ordered_blocks": 900, "held_blocks": 2000, "declared_blocks": 6000, "least_blocks": 128}
    mib = {"parameters_mib": 10, "kv_mib": 250, "rest_mib": 800}
    memory = {"device": "n", "state": "waiting", "used_blocks": 1024, "cause": None, **sizes, **mib}
    first, *others = mell.state["replicas"]
    seats = [
        {"replica": first["id"], "by": "hand", "held_mib": 1060, "why": "an operator has ordered its size"},
        {"replica": others[0]["id"], "by": "waits", "held_mib": 0, "why": "it needs 900 MiB"},
    ]
    devices = [{"id": "n", "budget_mib": 4000, "ordered_mib": 1060, "held_mib": 1060, "seats": seats}]
    mell.state = mell.state | {"replicas": [first | {"memory": memory}, *others], "devices": devices}
    head, row, waiting, node, *reasons = at("memory").stdout.splitlines()
    assert head.split() == ["REPLICA", "BY", "POOL", "USED", "BLOCKS", "ORDERED", "LEAST", "MOST", "MIB"]
    assert row.split() == [first["id"], "hand", "waiting", "1,024", "2,000", "900", "128", "6,000", "1,060"]
    assert waiting.split() == [others[0]["id"], "waits", "0"]
    assert node == "node n: 1,060 of 4,000 MiB held"
    assert reasons == [f"  {seat['replica']}: {seat['why']}" for seat in seats]
    shown = json.loads(at("memory", first["id"], "--json").stdout)
    assert shown == {"replicas": [{"id": first["id"], "memory": memory}]}
    assert json.loads(at("memory", "--json").stdout)["devices"] == devices
    assert "no replica 'z' is running" in at("memory", "z").stderr


def test_models_are_shown_with_their_replicas_requests_and_memory(at: Mell, mell: FakeMell) -> None:
    mell.state = SHARING
    chat, code = json.loads(at("models", "--json").stdout)["models"]
    assert chat == {
        "model": "chat",
        "names": ["chat", "chat-1b"],
        "replicas": {"awake": 1, "asleep": 1, "starting": 0},
        "requests": {"running": 1, "waiting": 1},
        "memory": {"parameters_mib": 2048, "kv_mib": 2200, "rest_mib": 930, "held_mib": 5178, "share": 5178 / 8192},
        "notes": [],
    }
    assert (code["names"], code["replicas"]["awake"], code["memory"]["held_mib"]) == (["code"], 1, 2868)
    mell.refusal = ApiError(401, "this call requires Authorization: Bearer <admin key>")
    refused = at("models", "--json")
    assert (refused.exit_code, "error" in json.loads(refused.stdout)) == (1, True)


def test_an_order_for_a_mode_says_what_it_does(at: Mell, mell: FakeMell) -> None:
    result = at("mode", "off", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"mode": "off"})
    assert mell.orders == [{"mode": "off"}]
    assert at("mode", "off").stdout == (
        "mode off: the scheduler begins no more moves, and opens and closes no replica\n"
    )
    assert at("mode", "on").exit_code == 2


@pytest.mark.parametrize(
    ("mode", "configured", "shown"),
    [("act", "act", "mode act\n"), ("off", "act", "mode off (by order; scheduler.mode is act)\n")],
)
def test_without_a_mode_the_present_one_is_shown(
    at: Mell, mell: FakeMell, mode: str, configured: str, shown: str
) -> None:
    mell.state = BUSY | {"mode": mode, "configured_mode": configured}
    assert at("mode").stdout == shown
    assert json.loads(at("mode", "--json").stdout) == {"mode": mode, "configured_mode": configured}
    assert at("status").stdout.splitlines()[1].startswith(shown.strip())
    assert not mell.orders


def test_a_prompt_is_looked_up_as_text_as_token_ids_or_as_messages(at: Mell, mell: FakeMell, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Where do blocks move?"}]
    (file := tmp_path / "chat.json").write_text(json.dumps(chat))
    options = ("--model", "sql", "--cache-salt", "alice:", "--session", "s")
    for words in (("blocks move",), ("--ids", "1", "2", "3"), ("--messages", str(file), *options)):
        result = at("cache", "match", *words)
        assert result.exit_code == 0 and "bbbbbbbb, by content" in result.stdout, result.stderr
    assert mell.orders == [
        {"prompt": "blocks move"},
        {"prompt": [1, 2, 3]},
        {"messages": chat, "model": "sql", "cache_salt": "alice:", "prompt_cache_key": "s"},
    ]
    for order in mell.orders:
        assert parse_order(MatchOrder, json.dumps(order).encode()).model_dump(exclude_none=True) == order
    assert json.loads(at("cache", "match", "blocks move", "--json").stdout) == MATCHED


def test_the_blocks_of_a_prompt_or_all_are_deleted(at: Mell, mell: FakeMell, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Where do blocks move?"}]
    (file := tmp_path / "chat.json").write_text(json.dumps(chat))
    options = ("--model", "sql", "--cache-salt", "alice:", "--replica", "b")
    for words in (("blocks move",), ("--ids", "1", "2", "3"), ("--messages", str(file), *options), ("--all",)):
        result = at("cache", "drop", *words)
        assert (result.exit_code, result.stdout) == (0, "a: 1 block deleted\nb: 75 blocks deleted\n"), result.stderr
    assert mell.orders == [
        {"prompt": "blocks move"},
        {"prompt": [1, 2, 3]},
        {"messages": chat, "model": "sql", "cache_salt": "alice:", "replica": "b"},
        {},
    ]
    for order in mell.orders:
        assert parse_order(DropOrder, json.dumps(order).encode()).model_dump(exclude_none=True) == order
    assert json.loads(at("cache", "drop", "--all", "--json").stdout) == mell.dropped
    wrong: list[tuple[str, ...]] = [(), ("--all", "x"), ("--all", "--ids"), ("--ids", "x")]
    assert {at("cache", "drop", *words).exit_code for words in wrong} == {2}


def test_the_blocks_of_a_prompt_are_pinned_for_a_time(at: Mell, mell: FakeMell) -> None:
    result = at("cache", "pin", "blocks move", "--ttl", "60", "--replica", "b")
    assert (result.exit_code, result.stdout) == (0, "b: 75 blocks pinned\n"), result.stderr
    result = at("cache", "pin", "--ids", "1", "2", "--ttl", "0")
    assert (result.exit_code, result.stdout) == (0, "b: 75 blocks pinned no more\n"), result.stderr
    assert mell.orders == [{"prompt": "blocks move", "replica": "b", "ttl_s": 60.0}, {"prompt": [1, 2], "ttl_s": 0.0}]
    for order in mell.orders:
        assert parse_order(PinOrder, json.dumps(order).encode()).model_dump(exclude_none=True) == order
    mell.unpinned = {"a": "no room"}
    result = at("cache", "pin", "x")
    assert (result.exit_code, result.stdout) == (1, "") and "a: no room" in result.stderr


def test_a_prompt_is_copied_between_two_replicas(at: Mell, mell: FakeMell) -> None:
    ends = ("--from", "a", "--to", "b")
    for words in (("blocks move",), ("--ids", "1", "2", "--model", "sql", "--cache-salt", "alice:")):
        result = at("cache", "copy", *words, *ends)
        assert (result.exit_code, result.stdout) == (0, "70 of 75 blocks sent, 9.2 MB in 41.0 ms\n"), result.stderr
    assert mell.orders == [
        {"prompt": "blocks move", "from": "a", "to": "b"},
        {"prompt": [1, 2], "model": "sql", "cache_salt": "alice:", "from": "a", "to": "b"},
    ]
    for order in mell.orders:
        parsed = parse_order(CopyPrompt, json.dumps(order).encode())
        assert parsed.model_dump(exclude_none=True, by_alias=True) == order
    assert json.loads(at("cache", "copy", "x", *ends, "--json").stdout)["blocks"] == 70
    assert {at("cache", "copy", *words).exit_code for words in ((*ends,), ("x", "--from", "a"))} == {2}


def test_a_replica_that_has_deleted_nothing_is_a_failure(at: Mell, mell: FakeMell) -> None:
    mell.dropped = {"blocks": {"b": 75}, "failed": {"a": "no answer within 10 s"}}
    result = at("cache", "drop", "--all")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "mell: a: no answer within 10 s\nb: 75 blocks deleted\n"


def test_a_prompt_that_is_refused_shows_the_servers_message(at: Mell, mell: FakeMell) -> None:
    mell.refusal = ApiError(404, "the model 'x' does not exist", param="model")
    result = at("cache", "match", "blocks move", "--model", "x")
    assert (result.exit_code, result.stderr) == (1, "mell: the model 'x' does not exist\n")


def test_a_watch_names_one_source(tmp_path: Path) -> None:
    file = str(tmp_path / "notice")
    for words in ([], ["--source", "file"], ["--source", "ec2", "--file", file], ["--source", "gke"]):
        assert run("node", "watch", *words).exit_code == 2


def test_a_watch_ends_with_ctrl_c(at: Mell, mell: FakeMell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.cli.__main__.Terminal", lambda as_json: Terminal(as_json, sleep=interrupt))
    (file := tmp_path / "notice").touch()
    assert at("node", "watch", "--file", str(file)).exit_code == 0
    assert mell.orders == [(socket.gethostname(), {"within_s": None})]


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("top",),
        ("migrations", "-f"),
        ("move", "r"),
        ("drain", "r"),
        ("node", "drain", "--self"),
        ("role", "r", "auto"),
        ("bounds", "1", "2"),
        ("level", "--ttft-p99", "2"),
        ("cache", "match", "x"),
        ("cache", "drop", "--all"),
        ("cache", "pin", "x"),
        ("cache", "copy", "x", "--from", "a", "--to", "b"),
    ],
)
def test_no_endpoint_is_status_3(command: tuple[str, ...]) -> None:
    result = run(*command, "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 3 and "nothing listens at" in result.stderr
    result = run(*command, "--json", "--url", f"http://127.0.0.1:{free_port()}")
    assert result.exit_code == 3 and "nothing listens" in json.loads(result.stdout)["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--url", "127.0.0.1:8000"),
        ("status", "--url", "http://x:port"),
        ("status", "--admin-key", "k\né"),
        ("move", "r", "--path", "carrier-pigeon"),
        ("migrations", "--last", "-1"),
        ("cache", "match"),
        ("cache", "match", "two", "words"),
        ("cache", "match", "--ids", "one"),
        ("cache", "match", "--ids"),
        ("cache", "match", "text", "--messages", "/nowhere.json"),
        ("cache", "match", "--messages", "/nowhere.json"),
        ("statsu",),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_the_version() -> None:
    assert run("--version").stdout == f"mell {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "module", "rest"),
    [
        (("replay", "--help"), "simulator.replay", ["--help"]),
        (("replay", "--trace", "x", "--url", "u"), "simulator.replay", ["--trace", "x", "--url", "u"]),
        (("simulate", "-h"), "simulator.__main__", ["-h"]),
        (("plan", "t.csv", "--help"), "simulator.planning", ["t.csv", "--help"]),
        (("keys", "team-a"), "app.keys", ["team-a"]),
        (("keys",), "app.keys", []),
    ],
)
def test_programs_get_all_arguments(
    arguments: tuple[str, ...], module: str, rest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    become: list[Any] = []
    monkeypatch.setattr("os.execve", lambda *given: become.append(given))
    run(*arguments)
    ((program, command, environment),) = become
    assert command == [program, "-P", "-m", module, *rest]
    assert environment["PYTHONPATH"]


def test_a_replay_uses_the_url_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    become: list[Any] = []
    monkeypatch.setattr("os.execve", lambda *given: become.append(given[1]))
    run("replay", "--minutes", "1", MELL_URL="http://x")
    assert become[0][3:] == ["simulator.replay", "--url", "http://x", "--minutes", "1"]
