"""The tools of operators on a running application: the page's events, the `mell` command, the documents."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx

from app.ingress.http.answers import Migrations, State
from tests.counts import LONG_ONLY
from tests.integration.application import Answer, Application, Client, eventually, prompt
from tests.integration.browser import needs_chromium, watching
from tests.integration.conftest import ROOT


async def mell(application: Application, *words: str) -> tuple[int, Any]:
    """Run the command; its exit status, and the document that it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.cli", *words, "--url", application.url, "--json"),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, json.loads(output)


async def snapshot(application: Application) -> dict[str, Any]:
    """The first event of a page."""
    async with (
        httpx.AsyncClient(base_url=application.url, timeout=20, trust_env=False) as http,
        http.stream("GET", "/mell/events") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in aiter_until(response, "data: ")]
    assert lines[0] == "event: snapshot"
    newest: dict[str, Any] = json.loads(lines[-1].removeprefix("data: "))
    return newest


async def aiter_until(response: httpx.Response, start: str) -> Any:
    """Lines, up to the first that starts so."""
    async for line in response.aiter_lines():
        yield line
        if line.startswith(start):
            return


async def other_than(client: Client, home: str) -> str:
    return next(str(r["id"]) for r in await client.running() if r["id"] != home)


async def test_the_page_shows_the_state(application: Application) -> None:
    async with application.client() as client:
        answer = Answer()
        running = asyncio.create_task(client.stream(answer, prompt(200, "page"), 2000, "watched"))
        await answer.until(3)
        state = await client.state()
        (home,) = [r["id"] for r in state["replicas"] for q in r["requests"] if q["label"] == "watched"]
        shown: dict[str, Any] = {}

        async def shows_the_request() -> bool:  # a page shows the last epoch, which may have been before the request
            shown.update(await snapshot(application))
            return "watched" in [row[2] for row in shown["requests"]]

        await eventually(shows_the_request)
        assert {row[0] for row in shown["replicas"]} == {r["id"] for r in state["replicas"]}
        assert [row[3] for row in shown["requests"] if row[2] == "watched"] == [home]
        async with httpx.AsyncClient(base_url=application.url, trust_env=False) as http:
            assert (await http.get("/mell/")).headers["content-type"].startswith("text/html")
        running.cancel()
        await client.idle()


@LONG_ONLY
async def test_a_request_is_moved_from_a_terminal(application: Application, tmp_path: Path) -> None:
    async with application.client() as client:
        answer = Answer()
        running = asyncio.create_task(client.stream(answer, prompt(200, "terminal"), 2000, "from-a-terminal"))
        await answer.until(3)
        status, state = await mell(application, "status")
        assert status == 0
        (home,) = [r["id"] for r in state["replicas"] for q in r["requests"] if q["label"] == "from-a-terminal"]
        target = await other_than(client, home)
        status, record = await mell(application, "move", "from-a-terminal", target, "--path", "kv", "--wait")
        assert (status, record["outcome"], record["target"]) == (0, "committed", target)
        assert (await mell(application, "move", "nobody", target))[0] == 1
        status, listed = await mell(application, "migrations", "--last", "1")
        assert (status, [m["id"] for m in listed["migrations"]]) == (0, [record["id"]])
        assert (await mell(application, "timeline", str(tmp_path / "mell.json")))[0] == 0
        spans = [event for event in json.loads((tmp_path / "mell.json").read_text()) if event["ph"] == "X"]
        assert record["id"] in [span["args"].get("id") for span in spans]
        running.cancel()
        await client.idle()


async def test_documents_are_as_described(application: Application) -> None:
    async with application.client() as client:
        State.model_validate(await client.state())
        Migrations.model_validate({"migrations": await client.migrations()})


@needs_chromium
async def test_a_forced_move_appears_on_the_page_and_its_button_makes_another(application: Application) -> None:
    async with application.client() as client, watching(application) as page:
        answer = Answer()
        running = asyncio.create_task(client.stream(answer, prompt(200, "seen"), 3500, "seen"))
        await answer.until(3)
        ((source, request),) = [(r["id"], q["id"]) for r in await client.running() for q in r["requests"]]
        target = await other_than(client, source)
        await page.on(request, source)
        assert (await client.move(request, target=target)).status_code == 202
        print(f"a forced move was on the page after {await page.on(request, target):.2f} s")
        await page.page.fill("#query", "seen")
        await page.page.press("#query", "Enter")
        await page.page.select_option("#detail select[name=target]", source)
        await page.page.click("#detail button[type=submit]")
        await page.page.click("#sure-yes")
        await page.on(request, source)
        (back, *_) = [m for m in await client.migrations() if m["request_id"] == request]
        assert (back["source"], back["target"], back["reason"]) == (target, source, "requested by operator")
        assert page.errors == []
        running.cancel()
        await client.idle()
