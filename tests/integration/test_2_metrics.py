"""`/metrics` of a running application: every documented metric, with what has really happened."""

import re
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.application import Application, Client, prompt
from tests.integration.conftest import ROOT
from tests.integration.test_1_migration import moved

DOCUMENTED = re.findall(r"^\| `(mell_\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)


async def scrape(client: Client) -> dict[str, Metric]:
    response = await client.http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def total(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of the samples of that name which have those labels."""
    samples = (sample for family in families.values() for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def replicas(samples: Iterable[Metric]) -> set[str]:
    return {sample.labels["replica"] for family in samples for sample in family.samples}


async def test_metrics_tell_what_has_happened(application: Application) -> None:
    async with application.client() as client:
        before = await scrape(client)
        _, records = await moved(client, "metered", prompt(300, "metered"), 60, [20], ["kv"])
        assert [record["outcome"] for record in records] == ["committed"]
        await client.http.post("/v1/completions", json={"prompt": 5})
        await client.idle()
        after = await scrape(client)

    def more(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert len(DOCUMENTED) > 10
    assert {name.removesuffix("_total") for name in DOCUMENTED} <= after.keys()
    assert more("mell_requests_total", endpoint="completions", outcome="length") == 1
    assert more("mell_requests_total", endpoint="completions", outcome="invalid_value") == 1
    assert (more("mell_request_prompt_tokens_total"), more("mell_request_completion_tokens_total")) == (300, 60)
    assert more("mell_request_ttft_seconds_count") == 1
    assert 30 < more("mell_request_itl_seconds_count") < 60, "steps that come together after a pause are one"
    assert more("mell_migrations_total", path="kv", outcome="committed") == 1
    assert more("mell_migration_pause_seconds_count", path="kv") == 1
    assert more("mell_migration_bytes_total") == records[0]["bytes"] > 0
    assert total(after, "mell_replicas", state="RUNNING") == 2 and more("mell_gpu_seconds_total") > 0
    assert (total(after, "mell_requests_running"), total(after, "mell_requests_lost_total")) == (0, 0)
    assert total(after, "mell_metrics_unreachable") == 0
    assert len(replicas(family for name, family in after.items() if name.startswith("vllm:"))) == 2
    assert more("vllm:generation_tokens_total") >= 60
