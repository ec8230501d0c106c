"""Every command in the documentation is valid, as far as that can be checked without a cluster."""

import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from starlette.routing import Match, Route

import app.keys
import simulator.__main__ as simulator
from app.frontend.guard.routes import OPEN_ROUTES
from app.ingress.access.keys import KeyFile
from app.ingress.errors import ApiError
from app.ingress.http.orders import (
    BoundsOrder,
    CopyPrompt,
    DrainOrder,
    DropOrder,
    HandOverOrder,
    LevelOrder,
    LoadAdapter,
    MatchOrder,
    MemoryRequest,
    ModeRequest,
    MoveRequest,
    NodeDrainOrder,
    PairRequest,
    PinOrder,
    RoleOrder,
    StartProfile,
    UnloadAdapter,
    parse_order,
)
from tests.app.cli.shown import takes
from tests.app.ingress.fakes import Backend, make_app, make_service
from tests.docs import markdown, shell
from tests.docs.markdown import PAGES, ROOT, Block

SHELL = ("sh", "bash", "console", "shell")
BLOCKS = [block for page in PAGES for block in markdown.blocks(page) if block.language in SHELL]
INLINE = [command for page in PAGES for command in markdown.commands(page)]

OTHERS = {
    r"vllm serve ": "vLLM's own server, to be compared with",
    r"docker|kubectl|helm|nvidia-smi|sudo|apt-get|git clone |cd |python3 -m venv |\. ": "tools that are not Mell's",
}
"""Commands that nothing here can check, and why."""

ORDERS: dict[str, type[BaseModel]] = {
    "/mell/migrations": MoveRequest,
    "/mell/cache": DropOrder,
    "/mell/cache/copy": CopyPrompt,
    "/mell/cache/pin": PinOrder,
    "/mell/cache/match": MatchOrder,
    "/mell/start_profile": StartProfile,
    "/v1/load_lora_adapter": LoadAdapter,
    "/v1/unload_lora_adapter": UnloadAdapter,
    "/mell/replicas/REPLICA/role": RoleOrder,
    "/mell/replicas/REPLICA/memory": MemoryRequest,
    "/mell/pairs": PairRequest,
    "/mell/mode": ModeRequest,
    "/mell/bounds": BoundsOrder,
    "/mell/level": LevelOrder,
    "/mell/ingress/drain": DrainOrder,
    "/mell/nodes/NODE/drain": NodeDrainOrder,
    "/mell/hand-over": HandOverOrder,
}
"""The bodies of operators' orders, by path."""

EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
"""The extras of Mell's package."""

WRITERS = {"docs.make": [], "tests.migration.protocol.test_diagrams": ["--write"]}
"""Modules that write pages, with their options; other tests compare the pages."""


def check_body(path: str, body: bytes) -> None:
    """Raise ApiError or ValidationError unless the body is valid."""
    if path in ORDERS:
        parse_order(ORDERS[path], body)
        return
    # Importing vLLM takes seconds.
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    bodies: dict[str, type[BaseModel]] = {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/messages": AnthropicMessagesRequest,
    }
    bodies[path].model_validate_json(body)


def check(words: list[str], monkeypatch: pytest.MonkeyPatch, routes: list[Route]) -> None:
    """Fail unless the command works, or is one of the others."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    command, *rest = words
    match command.removeprefix(".venv/bin/"), rest:
        case "python", ["-m", "app.keys", name]:
            app.keys.main([name])
        case "python", ["-m", module, *options] if module in WRITERS:
            assert find_spec(module) and options == WRITERS[module]
        case "python", ["-m", "app.serve", config]:
            assert (ROOT / config).exists()
        case "python", ["-m", module, *options]:
            shell.accepts(module, options, monkeypatch)
        case "mell", _:
            takes(rest)
        case "make", _:
            shell.makes(rest)
        case "curl", _:
            check_request(shell.request(words), routes)
        case "pip", ["install", *options]:
            check_installed(options)
        case "pytest", _:
            assert [path for path in rest if not path.startswith("-") and not (ROOT / path).exists()] == []
        case "serve", ["run", config]:
            assert (ROOT / config).exists()
        case _:
            assert any(re.match(known, " ".join(words)) for known in OTHERS), f"nothing checks {words}"


def check_installed(options: list[str]) -> None:
    """Fail unless the clone in the folder `mell` has the extras and the lock file that pip installs."""
    for option in options:
        if option.startswith("./mell"):
            extras = filter(None, option.removeprefix("./mell").strip("[]").split(","))
            assert set(extras) <= EXTRAS
        if option.startswith("mell/"):
            assert (ROOT / option.removeprefix("mell/")).exists()


def check_request(request: shell.Request, routes: list[Route]) -> None:
    """Fail unless there is such a route, and its body is valid."""
    host, _, path = request.url.removeprefix("http://").partition("/")
    path = "/" + path.partition("?")[0]
    assert host == "127.0.0.1:8000"
    scope = {"type": "http", "method": request.method, "path": path, "root_path": ""}
    open_to_clients = path in OPEN_ROUTES and OPEN_ROUTES[path].method == request.method
    own = any(route.matches(scope)[0] is Match.FULL for route in routes)
    assert own or open_to_clients, f"no route {request.method} {path}"
    if request.body is not None:
        check_body(path, json.dumps(json.loads(request.body)).encode())


@pytest.fixture
async def routes() -> list[Route]:
    return [route for route in make_app(Backend(make_service())).routes if isinstance(route, Route)]


@pytest.mark.parametrize("block", [*BLOCKS, *INLINE], ids=str)
def test_a_command_is_one_that_works(block: Block, monkeypatch: pytest.MonkeyPatch, routes: list[Route]) -> None:
    for words in shell.commands(block.text):
        check(words, monkeypatch, routes)


def test_the_pages_have_commands() -> None:
    assert len(BLOCKS) > 10 and len(INLINE) > 5


@pytest.mark.parametrize(
    "command",
    [
        "python -m simulator --no-such-option",
        "python -m simulator --poisson often",
        "python -m benchmarks.no_such_module",
        "make no-such-target",
        "make serve NO_SUCH=1",
        "curl http://127.0.0.1:8000/no/such/path",
        "curl -X PUT http://127.0.0.1:8000/live",
        "curl http://127.0.0.1:8000/v1/completions -d '{\"prompt\": 1}'",
        "pytest tests/no_such_folder",
        "no-such-program",
    ],
)
def test_a_wrong_command_is_found(command: str, monkeypatch: pytest.MonkeyPatch, routes: list[Route]) -> None:
    (words,) = shell.commands(command)
    with pytest.raises((AssertionError, ApiError, ImportError, SystemExit, ValidationError)):
        check(words, monkeypatch, routes)


@pytest.mark.slow
def test_the_example_of_the_simulator_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "simulation.md"
    examples = [words for block in BLOCKS if block.page == page for words in shell.commands(block.text)]
    (options,) = [words[3:] for words in examples if words[2:3] == ["simulator"] and "--lengths" in words]
    monkeypatch.chdir(tmp_path)
    assert simulator.main([*options, "--horizon", "900", "--seeds", "1", "--processes", "1", "--quiet"]) == 0
    assert json.loads((tmp_path / "runs.json").read_text())


def test_policies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulator.main(["--list-policies"]) == 0
    assert "worst_fit" in capsys.readouterr().out


def test_the_key_that_is_made_is_one_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("team-a", "my-team"):
        app.keys.main([name])
    file = tmp_path / "keys.yaml"
    file.write_text(capsys.readouterr().out)
    assert [key.name for key in KeyFile(str(file)).read()] == ["team-a", "my-team"]
