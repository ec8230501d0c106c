"""Several nodes: requests move between them, leave a node that drains, and outlive a node that dies.

The nodes are raylets of this machine with addresses of their own; each has room for one paced engine. Ingress and
scheduler stay on the head.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray.cluster_utils import Cluster

from tests.counts import LONG_ONLY
from tests.integration.application import BLOCK, Application, Client, eventually
from tests.integration.conftest import CACHED_KWARGS, ROOT, Stage
from tests.integration.namespaces import APART, needs_namespaces
from tests.integration.serving import stop_replica
from tests.integration.test_4_closed_loop import Streams, replicas, scene, until
from tests.integration.test_4_evacuation import after_closing, copies

HEAD = "127.0.1.1"
"""Not 127.0.0.1, which Ray takes for the machine's address towards others."""

CONTEXT = 2500
"""Prompt tokens that take much longer to compute anew than to move."""


class Nodes:
    """A Ray cluster: a head without room for engines, and nodes with room for one each, by their addresses."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "resources": {"head": 1}, "include_dashboard": False, "node_ip_address": HEAD}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        self._apart: dict[str, subprocess.Popen[bytes]] = {}
        self._draining: set[str] = set()
        self._added = 1

    @property
    def address(self) -> str:
        """The cluster's."""
        return str(self._cluster.address)

    @property
    def ids(self) -> dict[str, str]:
        """The nodes' addresses by their ids."""
        return {node.node_id: address for address, node in self._nodes.items()}

    def add(self) -> str:
        """A node more; returns its address."""
        address = self._next()
        self._nodes[address] = self._cluster.add_node(num_cpus=1, node_ip_address=address)
        return address

    def add_apart(self) -> str:
        """A node more, whose processes are in a PID namespace of their own."""
        address = self._next()
        start = ["ray", "start", f"--address={self.address}", f"--node-ip-address={address}", "--num-cpus=1", "--block"]
        command = [*APART, *start, "--object-store-memory=100000000"]
        self._apart[address] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return address

    def _next(self) -> str:
        self._added += 1
        return f"127.0.1.{self._added}"

    @contextmanager
    def watched(self, address: str, notice: Path, url: str) -> Iterator[None]:
        """The node drains once the file is there, as before a preemption."""
        command = [sys.executable, "-m", "app.cli", "node", "watch", address, "--file", str(notice), "--url", url]
        self._draining.add(address)
        watching = subprocess.Popen(command, cwd=ROOT)
        try:
            yield
        finally:
            watching.terminate()
            watching.wait(20)

    def kill(self, address: str) -> None:
        """The node is no more."""
        self._draining.discard(address)
        if address in self._apart:
            self._apart[address].kill()
            self._apart.pop(address).wait()
        else:
            self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def keep(self, count: int) -> None:
        """Have `count` nodes, all usable by Serve: none that drains."""
        for address in tuple(self._draining):
            self.kill(address)
        while len(self._nodes) > count:
            self.kill(next(iter(self._nodes)))
        while len(self._nodes) < count:
            self.add()

    def close(self) -> None:
        """All are gone."""
        for address in tuple(self._apart):
            self.kill(address)
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(stage: Stage) -> Iterator[Nodes]:
    """Two nodes, and applications that are shown from now on are shown on them."""
    stage.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        made = Nodes()
        try:
            made.keep(2)
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            stage.clear()
            made.close()


def config(transport: str) -> dict[str, Any]:
    """Two paced engines of a node each, evened out by the scheduler."""
    shipped: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    (application,) = shipped["applications"]
    on_head = {"placement": {"resources": {"head": 0.001}}}
    application["args"] |= {
        "engine": "paced",
        "engine_kwargs": {
            "num_gpu_blocks_override": 1024,
            "block_size": 16,
            "max_model_len": 8000,
            "decode_s": 0.02,
            "startup_s": 0.5,
        },
        "deployment_config": {
            "num_cpus": 1.0,
            "graceful_shutdown_timeout_s": 30.0,
            "health_check_period_s": 1.0,
            "autoscaling_config": {"min_replicas": 2, "max_replicas": 2},
        },
        "migration": {"transport": transport, "slot_mib": 1},
        "ingress": application["args"]["ingress"] | {"frontend_kwargs": CACHED_KWARGS, **on_head},
        "scheduler": {
            **on_head,
            "policy": "pack:evenness=0.1",
            "epoch_s": 0.5,
            "cooldown_s": 1.0,
            "manual_cooldown_s": 1.0,
        },
    }
    return shipped


@asynccontextmanager
async def two(nodes: Nodes, application: Application) -> AsyncIterator[tuple[Client, Streams, list[str]]]:
    """A client, its streams, and a replica on each of two nodes."""
    nodes.keep(2)
    async with scene(application) as (client, streams):
        await until(client, lambda now: len(now) == 2, 60)
        yield client, streams, list(await replicas(client))


@pytest.fixture
def spread(nodes: Nodes, stage: Stage) -> Application:
    """The application on several nodes."""
    return stage.show("nodes", config("collective"))


async def home(client: Client, label: str) -> str:
    """The replica that a request runs on."""
    (found,) = [r["id"] for r in await client.running() if label in [q["label"] for q in r["requests"]]]
    return str(found)


async def moved(client: Client, label: str, target: str) -> dict[str, Any]:
    """The record of a move by KV to that replica."""
    ordered = await client.move(label, target=target, path="kv")
    assert ordered.status_code == 202, ordered.text
    return await client.outcome(ordered.json()["id"])


async def where(client: Client) -> dict[str, dict[str, Any]]:
    """The running replicas by their ids."""
    return {r["id"]: r for r in await client.running()}


async def test_a_request_moves_by_hand_from_node_to_node_and_back(nodes: Nodes, spread: Application) -> None:
    async with two(nodes, spread) as (client, streams, both):
        before = await where(client)
        assert len({replica["node"] for replica in before.values()}) == 2
        await streams.start(1, 400, CONTEXT, "hand")
        for _ in range(2):
            await streams.go_on(20)  # more than a block
            source = await home(client, "hand-0")
            (target,) = set(both) - {source}
            record = await moved(client, "hand-0", target)
            assert (record["outcome"], record["path"]) == ("committed", "kv"), record
            assert record["blocks"] + record["present"] >= CONTEXT // 16 - 1
        after = await where(client)
        loaded = {r: after[r]["kv_blocks_loaded"] - before[r]["kv_blocks_loaded"] for r in both}
        assert max(loaded.values()) >= CONTEXT // 16 - 1, "moved there, the blocks were computed anew"
        assert min(loaded.values()) > 0, "moved back, those that had come since were computed anew"
        await streams.end()


@LONG_ONLY
async def test_transfers_are_between_the_addresses_of_the_nodes(nodes: Nodes, spread: Application) -> None:
    async with two(nodes, spread) as (client, streams, both):
        await streams.start(1, 2000, 200, "address")
        source = await home(client, "address-0")
        (target,) = set(both) - {source}
        assert (await moved(client, "address-0", target))["path"] == "kv"
        for replica in (await where(client)).values():
            sockets = psutil.Process(replica["pids"][0]).net_connections("tcp4")
            listening = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
            assert listening == {nodes.ids[replica["node"]]}


@LONG_ONLY
async def test_the_scheduler_evens_out_two_nodes_by_kv(nodes: Nodes, spread: Application) -> None:
    async with two(nodes, spread) as (client, streams, both):
        await streams.start(2, 600, CONTEXT, "even")
        homes = [await home(client, f"even-{i}") for i in range(2)]
        assert set(homes) == set(both)
        assert (await moved(client, "even-0", homes[1]))["outcome"] == "committed"
        await until(client, lambda now: sorted(now.values()) == [1, 1])
        (record, *_) = [m for m in await client.migrations() if m["reason"] == "balance"]
        assert (record["source"], record["target"]) == (homes[1], homes[0])
        assert (record["outcome"], record["path"]) == ("committed", "kv"), record
        assert record["blocks"] > 0
        await streams.end()


@LONG_ONLY
async def test_a_node_that_its_cloud_announces_is_evacuated(nodes: Nodes, spread: Application, tmp_path: Path) -> None:
    """By `mell node watch`, beside the streams of an example."""
    async with two(nodes, spread) as (client, _, both):
        victim = both[0]
        address = nodes.ids[(await where(client))[victim]["node"]]
        earlier = {m["id"] for m in await client.migrations()}
        nodes.add()
        notice = tmp_path / "preempted"
        with nodes.watched(address, notice, spread.url):
            example = (sys.executable, str(ROOT / "examples" / "spot.py"), str(notice), "--tokens", "1000")
            process = await asyncio.create_subprocess_exec(
                *(*example, "--streams", "4", "--url", spread.url),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "NO_PROXY": "127.0.0.1"},
            )

            async def gone() -> bool:
                return victim not in [r["id"] for r in (await client.state())["replicas"]]

            await eventually(gone, 60)
            output, _ = await process.communicate()
        assert process.returncode == 0 and b"4 of 4 streams whole" in output, output
        left = await until(client, lambda found: len(found) == 2, 40)
        assert victim not in left
        records = [m for m in await client.migrations() if m["source"] == victim and m["id"] not in earlier]
        how = {(m["reason"], m["outcome"]) for m in records if m["reason"] != "balance"}
        # By which path is theirs to choose: to start a node beside them makes links of this machine slow.
        assert how == {("evacuate", "committed")}, f"requests were lost, or never moved: {records}"
        nodes.kill(address)


async def test_a_node_that_dies_costs_a_pause(nodes: Nodes, spread: Application) -> None:
    async with two(nodes, spread) as (client, streams, both):
        await streams.start(4, 600, CONTEXT, "death")
        now = await where(client)
        assert all(replica["requests"] for replica in now.values())
        lost = [q["label"] for q in now[both[0]]["requests"]]
        await asyncio.to_thread(nodes.kill, nodes.ids[now[both[0]]["node"]])
        await streams.end()
        reasons = {m["label"]: m["reason"] for m in await client.migrations() if m["source"] == both[0]}
        assert all(reasons[label].startswith("replica lost") for label in lost)


@LONG_ONLY
async def test_a_replica_that_stops_leaves_its_cache_to_the_other_node(nodes: Nodes, spread: Application) -> None:
    """Serve stops a replica for a redeployment, for its own scale-down, and with a node that is drained."""
    async with two(nodes, spread) as (client, _, _):
        done, aborted = [await copies(client, outcome) for outcome in ("done", "aborted")]
        assert await after_closing(client, "stopped", stop_replica) == (6 * BLOCK, 6 * BLOCK)
        stopped = await copies(client, "done")
        assert stopped > done and await copies(client, "aborted") == aborted
        await until(client, lambda now: len(now) == 2, 60)
        assert await after_closing(client, "drained") == (6 * BLOCK, 6 * BLOCK)
        assert await copies(client, "done") > stopped and await copies(client, "aborted") == aborted


@pytest.fixture
def apart(nodes: Nodes, stage: Stage) -> Iterator[None]:
    """One node, and another one that shares no processes with it."""
    stage.clear()
    nodes.keep(1)
    nodes.add_apart()
    yield
    stage.clear()


@LONG_ONLY
@needs_namespaces
@pytest.mark.usefixtures("apart")
async def test_memory_that_nodes_do_not_share_is_not_shared(stage: Stage) -> None:
    async with scene(stage.show("nodes-shared", config("shared"))) as (client, streams):
        both = list(await until(client, lambda now: len(now) == 2, 60))
        await streams.start(1, 400, CONTEXT, "shared")
        (target,) = set(both) - {await home(client, "shared-0")}
        record = await moved(client, "shared-0", target)
        assert (record["outcome"], record["path"], record["blocks"]) == ("committed", "tokens", 0), record
        assert "set migration.transport to collective" in record["reason"]
        await streams.end()
