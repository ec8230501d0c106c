"""`/metrics` of a running application: every documented metric, with what has really happened."""

import re
from collections.abc import Iterable

from prometheus_client import Metric

from deployments.metrics.vllm import of_requests
from tests.counts import LONG_ONLY
from tests.integration.application import Application, prompt, total
from tests.integration.conftest import ROOT
from tests.integration.test_1_migration import moved

DOCUMENTED = re.findall(r"^\| `(mell_\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)

OF_ELASTIC_POOLS = {
    "mell_kv_blocks",
    "mell_memory_bytes",
    "mell_memory_budget_bytes",
    "mell_resizes",
    "mell_resize_seconds",
    "mell_blocks_renumbered",
    "mell_wakes",
    "mell_wake_seconds",
    "mell_pairs",
    "mell_pair_seconds",
    "mell_hop_seconds",
    "mell_lost_steps",
}
"""Those that only `memory.budget_mib` brings: see `test_7_memory`."""

OUTPUT = 600
"""Tokens of an answer that runs for longer than an order to move it takes on a busy machine."""


def replicas(samples: Iterable[Metric]) -> set[str]:
    return {sample.labels["replica"] for family in samples for sample in family.samples}


async def test_metrics_count_requests_and_migrations(application: Application) -> None:
    async with application.client() as client:
        before = await client.metrics()
        _, records = await moved(client, "metered", prompt(300, "metered"), OUTPUT, [20], ["kv"])
        assert [record["outcome"] for record in records] == ["committed"]
        await client.http.post("/v1/completions", json={"prompt": 5})
        await client.idle()
        after = await client.metrics()

    def more(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert len(DOCUMENTED) > 10
    assert {name.removesuffix("_total") for name in DOCUMENTED} - after.keys() == OF_ELASTIC_POOLS
    assert more("mell_requests_total", endpoint="completions", outcome="length") == 1
    assert more("mell_requests_total", endpoint="completions", outcome="invalid_request_error") == 1
    assert (more("mell_request_prompt_tokens_total"), more("mell_request_completion_tokens_total")) == (300, OUTPUT)
    assert more("mell_request_ttft_seconds_count") == 1
    assert OUTPUT / 2 < more("mell_request_itl_seconds_count") < OUTPUT, (
        "steps that come together after a pause are one"
    )
    assert more("mell_migrations_total", path="kv", outcome="committed") == 1
    assert more("mell_migration_pause_seconds_count", path="kv") == 1
    assert more("mell_migration_bytes_total") == records[0]["bytes"] > 0
    assert total(after, "mell_replicas", state="RUNNING") == 2 and more("mell_gpu_seconds_total") > 0
    assert (total(after, "mell_requests_running"), total(after, "mell_requests_lost_total")) == (0, 0)
    assert total(after, "mell_metrics_unreachable") == 0
    engines = {name: family for name, family in after.items() if name.startswith("vllm:") and not of_requests(name)}
    assert len(replicas(engines.values())) == 2
    assert more("vllm:generation_tokens_total") >= OUTPUT


@LONG_ONLY
async def test_vllms_metrics_of_requests_count_a_moved_request_once(application: Application) -> None:
    async with application.client() as client:
        before = await client.metrics()
        await moved(client, "whole", prompt(300, "whole"), 60, [20], ["kv"])
        await client.complete(prompt(20, "stops"), max_tokens=60, stop="e")
        await client.idle()
        after = await client.metrics()

    def more(name: str, **labels: str) -> float:
        return total(after, f"vllm:{name}", **labels) - total(before, f"vllm:{name}", **labels)

    assert [more("request_success_total", finished_reason=reason) for reason in ("length", "stop", "abort")] == [
        1,
        1,
        0,
    ]
    assert more("time_to_first_token_seconds_count") == more("e2e_request_latency_seconds_count") == 2
    assert more("request_prompt_tokens_sum") == 320 and 60 < more("request_generation_tokens_sum") <= 120
    assert 0 < more("request_prefill_time_seconds_sum") < more("e2e_request_latency_seconds_sum")
    assert len(replicas([after["vllm:request_success"]])) == 1, "replicas have none"
