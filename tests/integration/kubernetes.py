"""A Kubernetes API of one RayCluster, for Ray's own KubeRay autoscaler. Its pods are raylets of this machine.

The autoscaler reads the RayCluster and its pods, and patches the number of replicas of a group and the pods to be
deleted. Here that order is carried out at once, as KubeRay's operator does it.
"""

import json
import os
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec

from tests.integration.namespaces import APART

NAME = NAMESPACE = "mell"
PATH = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{NAME}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"

_OWN = ("bash", "-ec", 'for at in /tmp/ray /dev/shm; do mount -t tmpfs pod "$at"; done; exec "$@"', "pod")
"""The command that gives a pod its own sockets and shared memory. Raylets that start at once choose the same names."""


def head_environment() -> dict[str, str]:
    """The variables that KubeRay gives the head's raylet."""
    return _identity("head", "headgroup")


def _identity(pod: str, group: str) -> dict[str, str]:
    return {"RAY_CLOUD_INSTANCE_ID": pod, "RAY_NODE_TYPE_NAME": group}


COMMAND = ("ray", "kuberay-autoscaler", f"--cluster-name={NAME}", f"--cluster-namespace={NAMESPACE}")
"""KubeRay's command of its container beside the head's, but for the address."""


@dataclass
class Pod:
    """A pod; `process` is None for the head's, which others start."""

    name: str
    group: str
    ip: str
    process: subprocess.Popen[bytes] | None

    def shown(self) -> dict[str, Any]:
        """As the API has it."""
        runs = self.process is None or self.process.poll() is None
        labels = {
            "ray.io/cluster": NAME,
            "ray.io/node-type": "head" if self.group == "headgroup" else "worker",
            "ray.io/group": self.group,
        }
        state: dict[str, Any] = {"running": {}} if runs else {"terminated": {"exitCode": 0}}
        return {
            "metadata": {"name": self.name, "labels": labels},
            "status": {"podIP": self.ip, "containerStatuses": [{"name": "ray", "state": state}]},
        }


class Kubernetes:
    """The objects, and the pods that they ask for. `network` is the beginning of the pods' addresses."""

    def __init__(self, cluster: dict[str, Any], gcs: str, network: str, logs: Path) -> None:
        self._cluster = {"metadata": {"name": NAME, "namespace": NAMESPACE}, "spec": cluster}
        self._gcs, self._network, self._logs = gcs, network, logs
        self._lock = threading.Lock()
        self._made = 0
        self._pods = {"head": Pod("head", "headgroup", gcs.split(":")[0], None)}
        self._reconcile()

    def pods(self, group: str) -> set[str]:
        """The names of a group's pods."""
        with self._lock:
            return {name for name, pod in self._pods.items() if pod.group == group}

    def get(self, path: str) -> dict[str, Any] | None:
        """The object or list at a path, None if there is none."""
        with self._lock:
            if path == PATH:
                return self._cluster
            if path == PODS:
                return {"metadata": {"resourceVersion": "1"}, "items": [pod.shown() for pod in self._pods.values()]}
            return None

    def patch(self, operations: list[dict[str, Any]]) -> dict[str, Any]:
        """Replace parts of the RayCluster, and carry it out."""
        with self._lock:
            for operation in operations:
                assert operation["op"] == "replace", operation
                *way, last = operation["path"].strip("/").split("/")
                part: Any = self._cluster
                for step in way:
                    part = part[int(step) if isinstance(part, list) else step]
                part[last] = operation["value"]
            self._reconcile()
            return self._cluster

    def close(self) -> None:
        """No pod is left."""
        with self._lock:
            for name in [name for name in self._pods if name != "head"]:
                self._delete(name)

    def _reconcile(self) -> None:
        for group in self._cluster["spec"]["workerGroupSpecs"]:
            for name in group.get("scaleStrategy", {}).get("workersToDelete", ()):
                if name in self._pods:
                    self._delete(name)
            while sum(pod.group == group["groupName"] for pod in self._pods.values()) < group["replicas"]:
                self._add(group)

    def _add(self, group: Mapping[str, Any]) -> None:
        self._made += 1
        name, ip = f"{group['groupName']}-{self._made}", f"{self._network}.{self._made}"
        resources = _get_ray_resources_from_group_spec(group, False)
        flags = {f"--num-{kind.lower()}s": resources.pop(kind, 0) for kind in ("CPU", "GPU")}
        flags |= {"--memory": resources.pop("memory"), "--resources": json.dumps(resources)}
        flags |= {"--address": self._gcs, "--node-ip-address": ip, "--object-store-memory": 100_000_000}
        with (self._logs / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [*APART, *_OWN, "ray", "start", "--block", *(f"{flag}={value}" for flag, value in flags.items())],
                env=os.environ | _identity(name, group["groupName"]),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._pods[name] = Pod(name, group["groupName"], ip, process)

    def _delete(self, name: str) -> None:
        process = self._pods.pop(name).process
        assert process is not None
        process.kill()
        process.wait()


def _handler(kubernetes: Kubernetes) -> Callable[..., BaseHTTPRequestHandler]:
    class Requests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(kubernetes.get(urlsplit(self.path).path))

        def do_PATCH(self) -> None:
            operations = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(kubernetes.patch(operations) if self.path == PATH else None)

        def _answer(self, found: dict[str, Any] | None) -> None:
            body = json.dumps(found or {}).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    return Requests


@contextmanager
def autoscaling(kubernetes: Kubernetes, gcs: str, folder: Path) -> Iterator[None]:
    """Ray's KubeRay autoscaler runs, and asks this API by HTTPS, which it demands."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        (
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubernetes"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ),
        check=True,
        capture_output=True,
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(kubernetes))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT_HTTPS": str(server.server_address[1]),
        "RAY_KUBERAY_CA_CERT_PATH": str(certificate),
        # In the place of a token, which would have to be in /var/run.
        "RAY_KUBERAY_CLIENT_CERT_PATH": str(certificate),
        "RAY_KUBERAY_CLIENT_KEY_PATH": str(key),
        "NO_PROXY": "127.0.0.1",
    }
    with (folder / "autoscaler.log").open("w") as log:
        process = subprocess.Popen(
            (*COMMAND, f"--gcs-address={gcs}"),
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()
