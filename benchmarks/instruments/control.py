"""The control of `benchmarks.serving`: vLLM's own server over an engine core that it has not started.

    python -m benchmarks.instruments.control [OPTIONS OF vllm serve]

Mell's ingress connects vLLM's application to an engine by the same parameter (`client_addresses`), so the difference
between the two is Mell alone: neither Ray nor any part of Mell runs here.
"""

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
from vllm.v1.executor import Executor


def main() -> None:
    """Start the core, and serve until a signal."""
    args = make_arg_parser(FlexibleArgumentParser(prog="control")).parse_args()
    validate_parsed_serve_args(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    listeners = bind_engine_zmq_listeners(config)
    with launch_core_engines(config, Executor.get_class(config), True, listeners.addresses) as launch:
        pass  # At its end, the core runs.
    requests, outputs = listeners.inputs[0], listeners.outputs[0]
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


if __name__ == "__main__":
    main()
