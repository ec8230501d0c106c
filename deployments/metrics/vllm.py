"""vLLM's metrics of a process: engines expose those of their work, ingresses those of whole requests."""

from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from deployments.metrics.exposition import Family, expose

_OF_REQUESTS = frozenset(
    {
        "vllm:admission_rejections",
        "vllm:corrupted_requests",
        "vllm:e2e_request_latency_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:mm_cache_hits",
        "vllm:mm_cache_queries",
        "vllm:time_to_first_token_seconds",
        "vllm:tool_call_parser_invocations",
        "vllm:watermark_requests",
    }
)


def expose_engine(replica: str) -> tuple[Family, ...]:
    """The metrics of an engine's work, labelled with `replica`, the id of its process."""
    return tuple(family for family in _expose(replica) if not of_requests(family.name))


def expose_requests(replica: str, registry: Collector = REGISTRY) -> tuple[Family, ...]:
    """The metrics of whole requests, and those that only a frontend has, labelled with `replica`."""
    return tuple(family for family in _expose(replica, registry) if of_requests(family.name))


def _expose(replica: str, registry: Collector = REGISTRY) -> tuple[Family, ...]:
    return expose(registry, {"replica": replica}, "vllm:")


def of_requests(family: str) -> bool:
    """True for a metric of whole requests, or of a frontend alone; `family` has no `_total`."""
    return family in _OF_REQUESTS or family.startswith("vllm:request_")
