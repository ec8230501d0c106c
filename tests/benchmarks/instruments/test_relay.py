"""The relay passes messages on as they are, in their order."""

import subprocess
import sys
from pathlib import Path

import zmq

from benchmarks.servers import RELAY

LIMIT_MS = 30_000


def test_messages_of_several_parts_arrive_whole_and_in_order(tmp_path: Path) -> None:
    source, target = (f"ipc://{tmp_path}/{name}" for name in ("source", "target"))
    messages = [[b"%d" % number, bytes(1000)] for number in range(100)]
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.rcvtimeo = LIMIT_MS
        push.linger = 0
        pull.bind(target)
        push.connect(source)
        relay = subprocess.Popen([sys.executable, "-m", RELAY, source, target])
        try:
            for message in messages:
                push.send_multipart(message)
            assert [pull.recv_multipart() for _ in messages] == messages
        finally:
            relay.terminate()
            relay.wait()
