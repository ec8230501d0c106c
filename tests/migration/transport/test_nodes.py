"""Transports between nodes, with namespaces of this machine as nodes: each has network interfaces or processes of its
own. Needs root.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from migration.transport.shared import SharedSlots
from policies.model import ReplicaId
from tests.migration.transport.node_process import MIB, ROOT, content

pytestmark = pytest.mark.slow

A, B = ReplicaId("a"), ReplicaId("b")


def run(*command: str) -> None:
    """Run a system command. Raises CalledProcessError with the command's output."""
    subprocess.run(command, check=True, capture_output=True, text=True)


def end(*args: str, within: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """One end of a transport as a process, started through the command `within`."""
    command = [*within, sys.executable, "-m", "tests.migration.transport.node_process", *args]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Network:
    """Two nodes that share a cable and the file system, and nothing else."""

    addresses = ("10.213.77.1", "10.213.77.2")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = tuple(f"mell-{os.getpid()}-{end}" for end in "ab")
        self._ends: list[subprocess.Popen[str]] = []
        self._transfers = 0

    def open(self) -> None:
        """Create the nodes. Raises OSError or CalledProcessError where namespaces are not available."""
        for name in self._names:
            run("ip", "netns", "add", name)
        one, other = self._names
        run("ip", "-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
        for name, address in zip(self._names, self.addresses, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/30", "dev", "cable")
            for device in "lo", "cable":
                run("ip", "-n", name, "link", "set", device, "up")
        for verb, address, name in zip(("send", "recv"), self.addresses, self._names, strict=True):
            self._ends.append(end(verb, address, str(self.folder), within=["ip", "netns", "exec", name]))

    def close(self) -> None:
        """Delete the nodes, and with them the cable."""
        for process in self._ends:
            process.communicate(timeout=60)
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def shape(self, bytes_per_s: int) -> None:
        """Limit the bandwidth from the first node to the second."""
        rate = f"{bytes_per_s * 8}bit"
        limit = ("tbf", "rate", rate, "burst", "32kb", "latency", "200ms")
        run("tc", "-n", self._names[0], "qdisc", "replace", "dev", "cable", "root", *limit)

    def transfer(self, mib: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Pass a slot from the first node to the second; return both ends' answers."""
        self._transfers += 1
        for process in self._ends:
            assert process.stdin is not None
            print(json.dumps([f"pair-{self._transfers}", mib]), file=process.stdin, flush=True)
        sent, received = (answer(process) for process in self._ends)
        return sent, received


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next answer from one end."""
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    made = Network(tmp_path_factory.mktemp("rendezvous"))
    try:
        made.open()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"no network namespaces here (they need root and iproute2): {reason}")
    yield made
    made.close()


def test_slot_arrives_on_another_node(network: Network) -> None:
    sent, received = network.transfer(2)
    assert "error" not in sent | received, (sent, received)
    assert received["sha256"] == hashlib.sha256(content(2)).hexdigest()


def test_sender_listens_on_its_own_address(network: Network) -> None:
    network.transfer(1)
    words = [path.read_text() for path in network.folder.glob("rendezvous-*")]
    assert {word.rsplit(":", 1)[0] for word in words} == {network.addresses[0]}


def test_transfer_takes_as_long_as_the_link_needs(network: Network) -> None:
    took = {}
    for mib_per_s in 8, 2:
        try:
            network.shape(mib_per_s * MIB)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"links cannot be shaped here: {getattr(error, 'stderr', None) or error}")
        sent, received = network.transfer(4)
        assert "error" not in sent | received, (sent, received)
        took[mib_per_s] = received["seconds"]
        # The bucket's and the socket buffers' size passes without delay.
        assert 0.5 * 4 / mib_per_s < took[mib_per_s], "faster than the link"
    assert 2.5 < took[2] / took[8] < 6


@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare")
@pytest.mark.parametrize("other", [False, True], ids=["the same", "another"])
def test_slots_are_shared_with_processes_of_the_same_machine_and_namespace_only(other: bool) -> None:
    within = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if other else []
    if other and subprocess.run([*within, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespaces here (they need root)")
    with end("map", SharedSlots().channel(A, B, 0), within=within) as process:
        found = answer(process)
    if other:
        assert found["error"] == "TransferFailed" and "migration.transport to collective" in found["message"]
    else:
        assert found == {"segment": "/proc/1/fd/3"}
