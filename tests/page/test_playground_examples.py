"""The playground's examples on the included model, and their code as programs."""

import asyncio
import contextlib
import io
import re
import shutil
import subprocess
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from parrot.cluster import Cluster
from parrot.gateway.page.visitors import page_key

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser and one model for all

# What an output of each example has to contain.
SENSIBLE = {
    "animals of a place": "monkeys|sloths|jaguars|birds",
    "one question": "Paris",
    "map and reduce": "honey|flowers",
    "one of several answers": "^animals$",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def playground(browser: Browser) -> AsyncIterator[Page]:
    with Cluster(engines=[{"engine_type": "builtin", "model": "embedded"}]) as cluster:
        assert cluster.cluster_token is not None
        page = await browser.new_page()
        await page.goto(f"{cluster.core_url}/ui/#key={page_key(cluster.cluster_token)}")
        await page.wait_for_selector("header")
        await page.goto(f"{cluster.core_url}/ui/#/playground")
        yield page
        await page.close()


async def test_the_first_click_gives_a_sensible_answer(playground: Page) -> None:
    await playground.click("form button.main")
    outputs = playground.locator("pre.value")
    await expect(playground.locator(".out .pill.done")).to_have_count(2, timeout=60_000)
    for text in await outputs.all_inner_texts():
        assert re.search(SENSIBLE["animals of a place"], text), text
        assert text.endswith("."), text
    await playground.wait_for_selector(".out .meta >> text=from cache")


@pytest.mark.parametrize("example", list(SENSIBLE)[1:])
async def test_each_example_has_a_sensible_answer(playground: Page, example: str) -> None:
    await playground.get_by_label("Example").select_option(example)
    await playground.click("form button.main")
    calls = await playground.locator(".call textarea[aria-label^=Prompt]").count()
    await expect(playground.locator(".out .pill.done")).to_have_count(calls, timeout=60_000)
    texts = await playground.locator("pre.value").all_inner_texts()
    assert re.search(SENSIBLE[example], texts[0]), texts


async def test_the_code_runs(playground: Page) -> None:
    await playground.get_by_label("Example").select_option("map and reduce")
    for form in ("PFunc", "OpenAI"):
        await playground.click(f".code button >> text={form}")
        code = await playground.locator(".code pre").inner_text()
        printed = await asyncio.to_thread(run, code)
        assert len(printed.split()) > 3, printed
    await playground.click(".code button >> text=curl")
    code = (await playground.locator(".code pre").inner_text()).split("\n# with")[0]
    if shutil.which("curl"):
        answer = await asyncio.to_thread(
            subprocess.run, ["bash", "-c", code], capture_output=True, text=True, check=True
        )
        assert '"variables"' in answer.stdout, answer


def run(code: str) -> str:
    """Run a program, and return its output."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "playground.py", "exec"), {"__name__": "playground"})
    return printed.getvalue()
