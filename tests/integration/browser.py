"""The live page of a running application, in a real browser."""

import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.integration.application import Application

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")


class Page:
    """The live page in Chromium, and what its console complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    async def live(self) -> None:
        """Wait until it shows something."""
        await self.page.wait_for_function("() => document.querySelector('#status').dataset.state === 'live'")
        await self.page.wait_for_function("() => mell.model.replicas.size > 0")

    async def shown(self) -> tuple[set[str], dict[str, str]]:
        """The replicas, and where the requests are that are drawn."""
        script = """() => [[...mell.model.replicas.keys()],
            [...mell.stage.drawn].map(([n, to]) => [mell.model.requests.get(n).id, to.replica])]"""
        replicas, requests = await self.page.evaluate(script)
        return set(replicas), dict(requests)

    async def on(self, request: str, replica: str) -> float:
        """Wait until a request is shown on that replica; for how many seconds."""
        began = time.monotonic()
        await self.page.wait_for_function(
            "([id, replica]) => mell.model.byId(id)?.replica === replica", arg=[request, replica]
        )
        return time.monotonic() - began


@asynccontextmanager
async def watching(application: Application) -> AsyncIterator[Page]:
    """The page of the application, in a browser."""
    api = pytest.importorskip("playwright.async_api", reason="Playwright for Python is not installed")
    async with api.async_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox", "--disable-gpu"]}
        chromium = await playwright.chromium.launch(**options)
        try:
            page = Page(await chromium.new_page(viewport={"width": 1280, "height": 900}))
            await page.page.goto(f"{application.url}/mell/")
            await page.live()
            yield page
        finally:
            await chromium.close()
