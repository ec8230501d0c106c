"""The image as Kubernetes runs it: user 1000, no capabilities, a read-only root, Mell as process 1.

The containers have no network but their own loopback. Clients are wget in the container, as KubeRay's probes are.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.style.sources import ROOT

IMAGE = os.environ.get("MELL_IMAGE", "")
START_LIMIT_S = 300
GRACE_S = 90
"""The time that docs/operations.md gives to a container."""
TOKENS = 100
BODY = {
    "prompt": "Blocks move",
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RUNTIME = ["--runtime=runc", "--ulimit=nofile=20000:20000", "--ulimit=nproc=20000:20000"]
"""With limits that can be set everywhere: those of podman and buildah are higher."""
RIGHTS = ["--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--pids-limit=4096", "--memory=8g"]
FLAGS = [*RUNTIME, *RIGHTS, "--network=none", "--tmpfs=/tmp:exec", "--volume=/home/mell"]
EVERYWHERE = "http://127.0.0.2:8000"
"""An address that only a server at 0.0.0.0 has."""

pytestmark = [
    pytest.mark.skipif(not IMAGE, reason="make image-test builds the image, with mmdebstrap, buildah, podman and runc"),
    pytest.mark.slow,
    pytest.mark.timeout(START_LIMIT_S + 2 * GRACE_S),
]


class Container:
    """A container with Mell, and one beside it that owns the shared memory of both, as a pod does."""

    def __init__(self, name: str) -> None:
        self.name, self.pod = name, f"{name}-pod"
        shared = ("--ipc", "shareable", "--shm-size", "2g")
        podman("run", "--detach", "--name", self.pod, *FLAGS, *shared, IMAGE, "sleep", "infinity")
        podman("run", "--detach", "--name", name, *FLAGS, "--ipc", f"container:{self.pod}", IMAGE)

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["podman", "exec", self.name, *command], capture_output=True, text=True, timeout=60)

    def ask(self, path: str) -> "subprocess.CompletedProcess[str]":
        return self.run("wget", "-qO-", "-T", "10", "-t", "1", f"http://127.0.0.1:8000{path}")

    def stream(self) -> "subprocess.Popen[str]":
        """The client of a streamed completion."""
        options = ["-qO-", "--header", "Content-Type: application/json", "--post-data", json.dumps(BODY)]
        command = ["podman", "exec", self.name, "wget", *options, f"{EVERYWHERE}/v1/completions"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def inspect(self, member: str) -> str:
        return podman("inspect", "--format", f"{{{{.{member}}}}}", self.name).strip()

    def log(self) -> str:
        done = subprocess.run(["podman", "logs", self.name], capture_output=True, text=True)
        return (done.stdout + done.stderr)[-6000:]

    def shared_memory(self) -> list[str]:
        """The names of what is in /dev/shm, also after the end of Mell."""
        return podman("exec", self.pod, "ls", "-A", "/dev/shm").split()


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=GRACE_S + 60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def whole(answer: str) -> bool:
    """True if a stream has all its tokens and its end."""
    *_, usage, end = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    return end == "[DONE]" and json.loads(usage)["usage"]["completion_tokens"] == TOKENS


@pytest.fixture(scope="module")
def mell() -> Iterator[Container]:
    """Mell, ready."""
    name = f"mell-test-{os.getpid()}"
    try:
        began = time.monotonic()
        made = Container(name)
        while made.ask("/health").returncode != 0:
            assert made.inspect("State.Running") == "true", made.log()
            assert time.monotonic() < began + START_LIMIT_S, made.log()
            time.sleep(1)
        print(f"\nimage: /health is 200 after {time.monotonic() - began:.0f} s")
        yield made
    finally:
        for each in (name, f"{name}-pod"):
            subprocess.run(["podman", "rm", "--force", "--volumes", "--time=0", "--ignore", each], capture_output=True)


def test_process_1_is_an_ordinary_user_without_rights(mell: Container) -> None:
    status = dict(line.split(":", 1) for line in mell.run("cat", "/proc/1/status").stdout.splitlines())
    assert status["Uid"].split() == status["Gid"].split() == ["1000"] * 4
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"].strip() == "1"
    assert "mell.app.serve" in mell.run("cat", "/proc/1/cmdline").stdout


def test_the_root_is_read_only(mell: Container) -> None:
    assert "Read-only file system" in mell.run("touch", "/opt/mell/file").stderr


def test_the_object_store_is_in_shared_memory(mell: Container) -> None:
    raylet = mell.run("bash", "-c", "tr '\\0' '\\n' < /proc/$(pgrep -x raylet)/cmdline").stdout
    assert "--plasma_directory=/dev/shm" in raylet, raylet


def test_kuberay_finds_its_programs(mell: Container) -> None:
    for command in ("bash --version", "wget --version", "ray kuberay-autoscaler --help", "mell doctor --help"):
        assert mell.run(*command.split()).returncode == 0, command
    probe = "wget --tries 1 -T 2 -q -O- http://localhost:8000/-/healthz | grep success"
    assert mell.run("bash", "-c", probe).returncode == 0


def test_a_stream_is_answered(mell: Container) -> None:
    assert "smollm2-135m" in mell.ask("/v1/models").stdout
    answer, _ = mell.stream().communicate(timeout=120)
    assert whole(answer), answer[-2000:]


def test_a_stop_lets_a_stream_end_and_leaves_nothing(mell: Container) -> None:
    client = mell.stream()
    assert client.stdout is not None
    first = client.stdout.readline()
    began = time.monotonic()
    podman("stop", "--time", str(GRACE_S), mell.name)
    took = time.monotonic() - began
    print(f"\nimage: stopped after {took:.0f} s, with a stream")
    answer, _ = client.communicate(timeout=60)
    assert whole(first + answer), answer[-2000:] + mell.log()
    assert mell.inspect("State.ExitCode") == "0", mell.log()
    assert took < GRACE_S
    assert mell.shared_memory() == []


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("mell serve /models/none", "/models/none"),
        ("python -P -m mell.app.serve none.yaml", "none.yaml: there is no such file"),
    ],
)
def test_a_wrong_command_ends_with_a_sentence(command: str, sentence: str) -> None:
    started = ["podman", "run", "--rm", *FLAGS, IMAGE, *command.split()]
    ended = subprocess.run(started, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and sentence in ended.stderr and "Traceback" not in ended.stderr, ended


def test_a_device_that_does_not_exist_is_refused() -> None:
    arguments = ["--network", "host", "--build-arg", "DEVICE=tpu", "--build-arg", f"BASE={IMAGE}"]
    command = ["buildah", "build", *RUNTIME, *arguments, "--file", str(ROOT / "deploy" / "Containerfile"), str(ROOT)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0 and "DEVICE is 'tpu', but has to be cpu or cuda.\n" in ended.stderr, ended.stderr
