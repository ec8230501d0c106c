"""Has Ray start a worker process before there is an actor for it.

Ray gives an actor an idle worker of the same job and runtime environment, if its node has one, and starts a worker
otherwise. Ray's node manager starts workers in advance on request. That request is internal to Ray (tested with 2.60).
"""

import logging

import ray

log = logging.getLogger("ray.serve")

_KEEP_S = 365 * 86_400
"""Time for which Ray keeps the worker if it stays idle."""

_LIMIT_S = 10.0


async def prestart_worker() -> None:
    """Have this node start a worker for an actor like this one. A failure is a warning in the log."""
    try:
        await _prestart()
    except Exception as error:
        log.warning("Ray starts no worker in advance: %r", error)


async def _prestart() -> None:
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.common_pb2 import Language
    from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
    from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
    from ray.core.generated.runtime_environment_pb2 import RuntimeEnvInfo

    context = ray.get_runtime_context()
    node = ray._private.worker._global_node
    request = PrestartWorkersRequest(
        language=Language.PYTHON,
        job_id=bytes.fromhex(context.get_job_id()),
        runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=context.get_runtime_env_string()),
        keep_alive_duration_secs=_KEEP_S,
        num_workers=1,
    )
    async with init_grpc_channel(f"{node.node_ip_address}:{node.node_manager_port}", asynchronous=True) as channel:
        await NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_LIMIT_S)
