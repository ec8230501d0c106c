"""The control of `benchmarks.serving`: vLLM's own server over an engine core that it has not started.

    python -m benchmarks.instruments.control [--relayed] [OPTIONS OF vllm serve]

Mell's ingress connects vLLM's application to an engine by the same parameter (`client_addresses`), so the difference
between the two is Mell alone: neither Ray nor any part of Mell runs here. With `--relayed`, the engine's outputs pass
through one more process, which forwards them unread: the least that any process between an engine and a frontend takes.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
from vllm.v1.executor import Executor

from app.vllm_cli.arguments import make_arg_parser, validate_parsed_serve_args
from benchmarks.servers import RELAY


def main() -> None:
    """Start the core, and serve until a signal."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="control"))
    parser.add_argument("--relayed", action="store_true")
    args = parser.parse_args()
    validate_parsed_serve_args(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    listeners = bind_engine_zmq_listeners(config)
    requests, outputs = listeners.inputs[0], listeners.outputs[0]
    with contextlib.ExitStack() as stack:
        addresses = listeners.addresses
        if args.relayed:
            addresses = replace(addresses, outputs=[stack.enter_context(_relay(outputs.address))])
        with launch_core_engines(config, Executor.get_class(config), True, addresses) as launch:
            pass  # At its end, the core runs.
        client = {
            "input_address": requests.address,
            "output_address": outputs.address,
            "input_listener": requests.socket,
            "output_listener": outputs.socket,
        }
        address, listening = setup_server(args, reuse_port=False)
        try:
            uvloop.run(run_server_worker(address, listening, args, client))
        finally:
            if launch.engine_manager is not None:
                launch.engine_manager.shutdown()


@contextlib.contextmanager
def _relay(address: str) -> Iterator[str]:
    """Run a process that forwards outputs to `address`; its own address."""
    with tempfile.TemporaryDirectory() as folder:
        own = f"ipc://{Path(folder, 'outputs')}"
        process = subprocess.Popen([sys.executable, "-m", RELAY, own, address])
        try:
            yield own
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
