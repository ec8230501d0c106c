"""Observability of a running application under traffic: Prometheus scrapes it, a browser has the page open."""

import asyncio
import json
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.dashboard import legends, query_of
from tests.counts import LONG_ONLY
from tests.integration.application import Application, Client, eventually
from tests.integration.browser import needs_chromium, watching
from tests.integration.conftest import ROOT, free_port
from tests.integration.test_2_metrics import OF_ELASTIC_POOLS

PROMETHEUS = shutil.which("prometheus")
OF_ENGINES = [expression for expression in legends() if "vllm:" in expression]
"""The dashboard's expressions for which paced engines have no data."""
OF_MEMORY = [expression for expression in legends() if any(name in expression for name in OF_ELASTIC_POOLS)]
"""Its expressions that have data with `memory.budget_mib` only."""

DOCUMENTED = re.findall(
    r"^\| `(mell_\w+)` \| (\w+) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
)  # a dry run's are in another column


ORDERED = "requested by operator"


async def replay(application: Application, folder: Path) -> dict[str, Any]:
    """Replay the small trace, moving a request a second; the report."""
    trace = ROOT / "tests/data/small_trace.csv.gz"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simulator.replay", "--trace", str(trace), "--minutes", "1", "--time-scale", "0.5"),
        *("--move-every", "1", "--url", application.url),
        *(part for kind in ("json", "png", "html") for part in (f"--{kind}", str(folder / f"replay.{kind}"))),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0
    report: dict[str, Any] = json.loads((folder / "replay.json").read_text())
    assert report["summary"]["ok"] == report["trace"]["requests"] == 40, report["errors"]
    return report


# --- Prometheus -------------------------------------------------------------------------------------------


class Prometheus:
    """A real one, that scrapes the application every second."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that an expression gives now."""
        response = await self._http.get("/api/v1/query", params={"query": expression})
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()["data"]["result"]
        return found

    async def value(self, expression: str) -> float:
        """The one value of an expression; 0 where there is nothing."""
        found = await self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0


@asynccontextmanager
async def scraping(application: Application, folder: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus with the settings of the documentation, for as long as it takes."""
    target = application.url.removeprefix("http://")
    written = (ROOT / "docs/metrics.md").read_text().split("```yaml\n")[1].split("```")[0]
    assert '"127.0.0.1:8000"' in written
    settings = "global: {scrape_interval: 1s}\n" + written.replace("127.0.0.1:8000", target)
    (folder / "prometheus.yml").write_text(settings)
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *(f"--web.listen-address={address}", "--log.level=error"),
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20, trust_env=False) as http:
            made = Prometheus(http)

            async def ready() -> bool:
                try:
                    return (await http.get("/-/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            async def up() -> bool:
                return await made.value("up") == 1

            await eventually(ready, 60)
            await eventually(up, 60)
            yield made
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (apt-get install prometheus)")
async def test_prometheus_has_every_metric_and_the_counts_of_the_replay(paced: Application, tmp_path: Path) -> None:
    counted = {
        "requests": 'sum(mell_requests_total{endpoint="completions",outcome="length"})',
        "prompts": "sum(mell_request_prompt_tokens_total)",
        "outputs": "sum(mell_request_completion_tokens_total)",
        "firsts": "sum(mell_request_ttft_seconds_count)",
        "moves": 'sum(mell_migrations_total{outcome="committed",reason="requested by operator"})',
        "pauses": "sum(mell_migration_pause_seconds_count)",
    }
    async with paced.client() as client, scraping(paced, tmp_path) as prometheus:
        await client.idle()
        before = {name: await prometheus.value(expression) for name, expression in counted.items()}
        gpu_seconds, began = await prometheus.value("sum(mell_gpu_seconds_total)"), time.monotonic()
        known = {m["id"] for m in await client.migrations()}
        report = await replay(paced, tmp_path)
        await client.idle()
        moved = [m for m in await client.migrations() if m["id"] not in known and m["outcome"] == "committed"]
        want = {
            "requests": report["summary"]["ok"],
            "prompts": report["trace"]["prompt_tokens"],
            "outputs": report["summary"]["output_tokens"],
            "firsts": report["summary"]["requests"],
            "moves": sum(m["reason"].startswith(ORDERED) for m in moved),
            "pauses": len(moved),
        }
        assert want["moves"] > 0
        more: dict[str, float] = {}

        async def as_counted() -> bool:
            more.update({name: await prometheus.value(counted[name]) - before[name] for name in counted})
            return more == want

        try:
            await eventually(as_counted, 20)
        except TimeoutError:
            pytest.fail(f"Prometheus counted {more}, the replay {want}")
        lasting = time.monotonic() - began
        used = await prometheus.value("sum(mell_gpu_seconds_total)") - gpu_seconds
        assert 0.5 * lasting < used < 4 * lasting + 5, "one to four replicas"
        assert await prometheus.value('sum(mell_replicas{state="RUNNING"})') >= 1
        assert await prometheus.value("sum(mell_requests_lost_total)") == 0
        assert len(DOCUMENTED) > 15
        missing = [
            name
            for name, kind in DOCUMENTED
            if name.removesuffix("_total") not in OF_ELASTIC_POOLS
            and not await prometheus.query(f"{name}_count" if kind == "histogram" else name)
        ]
        assert missing == []
        await client.set_mode("observe")
        try:
            await _shown(prometheus, [e for e in legends() if e not in (*OF_ENGINES, *OF_MEMORY)])
        finally:
            await client.set_mode("act")


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (apt-get install prometheus)")
async def test_the_panels_of_engines_have_data(application: Application, tmp_path: Path) -> None:
    async with application.client() as client, scraping(application, tmp_path) as prometheus:
        await client.complete("Panels", 50)
        await _shown(prometheus, OF_ENGINES)


async def _shown(prometheus: Prometheus, expressions: Sequence[str]) -> None:
    """Wait until every expression has data."""
    missing: list[str] = []

    async def none() -> bool:
        missing[:] = [e for e in expressions if not await prometheus.query(query_of(e, 60))]
        return not missing

    try:
        await eventually(none, 20)
    except TimeoutError:
        pytest.fail(f"no data: {missing}")


# --- the page ---------------------------------------------------------------------------------------------


async def homes(client: Client) -> tuple[set[str], dict[str, tuple[str, int]]]:
    """The replicas that are there, and where their requests are and how often each has moved."""
    replicas = (await client.state())["replicas"]
    return {r["id"] for r in replicas}, {q["id"]: (r["id"], q["hop"]) for r in replicas for q in r["requests"]}


@needs_chromium
@LONG_ONLY
async def test_the_page_shows_the_state_under_traffic(paced: Application, tmp_path: Path) -> None:
    async with paced.client() as client, watching(paced) as page:
        replaying = asyncio.create_task(replay(paced, tmp_path))
        compared = 0
        while not replaying.done():
            before = await homes(client)
            await asyncio.sleep(2)  # a difference that stays this long must be on the page, too
            shown = await page.shown()
            after = await homes(client)
            assert before[0] & after[0] <= shown[0]
            stayed = {request: home[0] for request, home in after[1].items() if before[1].get(request) == home}
            assert {request: shown[1].get(request) for request in stayed} == stayed
            compared += len(stayed)
        await replaying
        assert compared > 10
        assert page.errors == []
        await client.idle()
