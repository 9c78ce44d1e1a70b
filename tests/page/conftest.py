"""A real browser in front of a served core."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from parrot.gateway.page.visitors import page_key
from parrot.serve.config import CoreConfig
from tests.page.stage import Stage, open_stage
from tests.server.test_serve_http import Site, open_site
from tests.support.programs import chromium

TOKEN = "inside"


@dataclass
class Visit:
    """An open page, and its recorded errors and requests."""

    site: Site
    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return str(self.site.http._base_url).rstrip("/")

    def listen(self) -> None:
        """Record errors and requests from now on."""

        def record_error(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.errors.append(message.text)

        self.page.on("console", record_error)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))

    async def open(self, view: str = "") -> None:
        await self.page.goto(f"{self.url}/ui/#key={page_key(TOKEN)}")
        await self.page.wait_for_selector("header")
        if view:
            await self.page.goto(f"{self.url}/ui/#/{view}")

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def wait_text(self, selector: str, text: str) -> None:
        """Wait until an element has the text."""
        await self.page.locator(selector, has_text=text).first.wait_for(timeout=20_000)

    async def answer(self, text: str) -> None:
        """Wait until the engine runs one call, and finish it with the text."""
        await self.site.started()
        self.site.engine.answer(self.site.engine.held[0], text)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Browser) -> AsyncIterator[Visit]:
    """A page of a core whose engine answers when the test tells it to. At the end, checks that the
    browser had no errors and sent requests only to the core."""
    async for site in open_site(CoreConfig(cluster_token=TOKEN)):
        context = await browser.new_context(viewport={"width": 1280, "height": 900})
        visit = Visit(site, await context.new_page())
        visit.listen()
        yield visit
        await context.close()
        assert visit.errors == []
        assert all(url.startswith(visit.url) for url in visit.requests), visit.requests
        site.core.check_integrity()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(browser: Browser) -> AsyncIterator[Stage]:
    """A page on a desktop. At the end, checks that the browser had no errors."""
    stage = await open_stage(browser)
    yield stage
    await stage.page.context.close()
    assert stage.errors == []
