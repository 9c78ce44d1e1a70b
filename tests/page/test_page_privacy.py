"""An operator of a server with API keys sees times and tokens, and no text of a tenant."""

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import Browser

from parrot.gateway.page.visitors import page_key
from parrot.serve.config import CoreConfig
from tests.page.conftest import TOKEN, Visit
from tests.server.test_serve_http import open_site

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "the-secret-words"


async def ask(visit: Visit, key: str) -> dict[str, Any]:
    """Run a call of the key's tenant, whose prompt, input and output are secret."""
    headers = {"Authorization": f"Bearer {key}"}
    call = {
        "template": f"Repeat {SECRET}: {{{{word}}}} {{{{text}}}}",
        "func_name": "repeat",
        "parameters": [
            {"name": "word", "var": "word"},
            {"name": "text", "is_output": True, "var": "text"},
        ],
    }
    body = {
        "session": {"apps": ["private"]},
        "variables": [{"name": "word", "content": SECRET}],
        "calls": [call],
    }
    answer: dict[str, Any] = await visit.site.post("/v1/semantic_graph", body, headers=headers)
    scope = {name: answer[name] for name in ("session_id", "session_auth")}
    output = answer["variables"]["text"]
    read = asyncio.create_task(visit.site.get(f"/v1/semantic_var/{output}", **scope))
    await visit.answer(SECRET)
    await read
    return answer


async def test_no_answer_contains_texts_for_an_operator(browser: Browser) -> None:
    config = CoreConfig(cluster_token=TOKEN, api_keys=("k1", "k2"))
    async for site in open_site(config):
        context = await browser.new_context(viewport={"width": 1400, "height": 900})
        visit = Visit(site, await context.new_page())
        visit.listen()
        await site.join()
        graph = await ask(visit, "k1")
        run = f"run/{graph['session_id']}/{graph['variables']['text']}"
        for key, sees in ((page_key(TOKEN), False), ("k1", True), ("k2", None)):
            shown = await everything(visit, key, ["", run, "engines", "tenants", "events"])
            assert (SECRET in shown) is bool(sees), key
            assert ("repeat" in shown) is (sees is not None), key
        await context.close()


async def everything(visit: Visit, key: str, views: list[str]) -> str:
    """Return all text that the page shows with this key, and the answers of ServeCore."""
    page = visit.page
    await page.goto(f"{visit.url}/ui/#key={key}")
    await page.wait_for_selector("header")
    shown = ""
    for view in views:
        await page.goto(f"{visit.url}/ui/#/{view}")
        await page.locator("main h1").first.wait_for()
        await page.wait_for_timeout(600)
        shown += await page.inner_text("main")
    asked = await page.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
    run = next(path for path in asked if re.search(r"/sessions/\d+$", path))
    files = [f"{run}/{name}" for name in ("run.json", "trace.json", "calls/0/prompt")]
    for path in {*asked, *files}:
        if "/api/" in path and not path.endswith(("enter", "me")):
            shown += await page.evaluate(_FIRST_EVENT, path)
    await page.click("text=Sign out")
    await page.wait_for_selector("#key")
    return shown


# The first event of a feed, or the whole answer.
_FIRST_EVENT = """
async (path) => {
  const stop = new AbortController();
  const reader = (await fetch(path, {signal: stop.signal})).body.getReader();
  const {value} = await reader.read();
  stop.abort();
  return value ? new TextDecoder().decode(value) : "";
}
"""
