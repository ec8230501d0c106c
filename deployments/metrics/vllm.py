"""Which process exposes which of vLLM's metrics: engines those of their work, ingresses those of whole requests."""

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


def of_requests(family: str) -> bool:
    """True for a metric of whole requests, and of what only a frontend sees; `family` has no `_total`."""
    return family in _OF_REQUESTS or family.startswith("vllm:request_")
