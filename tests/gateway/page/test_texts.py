"""Texts of a tenant: no view of the page shows them to another tenant, or to operators without
the right to see values."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from parrot.gateway.page.endpoints import Page
from parrot.gateway.page.history import History
from parrot.protocol.errors import EngineFailed
from parrot.serve.config import CoreConfig
from tests.gateway.page.test_page_http import KEY, TOKEN, watching
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import Script, fake_engine
from tests.support.requests import given, made, taken

SECRET = "flamingo"
"""It stands in every prompt, value and error of the tenant."""


@asynccontextmanager
async def guarded() -> AsyncIterator[Site]:
    config = CoreConfig(cluster_token=TOKEN, api_keys=("k1", "k2"))
    async with serve(config, fake_engine("e0", model=MODEL)) as site:
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(site.http._base_url, cookie_jar=jar) as http:
            site.http = http
            yield site


def endpoints(site: Site) -> set[str]:
    """The paths of all views of the page."""
    routes = Page(site.core, None, History(site.core)).routes()
    paths = {str(getattr(route, "path", "")) for route in routes if "GET" in methods(route)}
    return {path for path in paths if path.startswith("/ui/api/")}


def methods(route: object) -> set[str]:
    found: set[str] = getattr(route, "methods", None) or set()
    return found


async def answer(site: Site, path: str) -> tuple[int, str]:
    """An answer, or the first event of a feed."""
    async with asyncio.timeout(20), site.http.get(path) as response:
        if not response.headers["content-type"].startswith("text/event-stream"):
            return response.status, await response.text()
        lines = []
        async for line in response.content:
            lines.append(line.decode())
            if line == b"\n":
                break
        return response.status, "".join(lines)


async def fill(site: Site) -> tuple[list[int], dict[str, str]]:
    """Run a program and a chat of the tenant of `k1`. Returns the ids of their runs, and values for
    the parameters of paths."""
    key = {"Authorization": "Bearer k1"}
    scope = await site.post("/v1/session", {"api_key": "k1", "apps": ["letters"]})
    engine = site.engine
    engine.script = Script(text=lambda prompt: f"The {SECRET} sings.")
    engine.scripts = [Script(error=EngineFailed(f"no {SECRET} fits"))]
    template = f"Write about the {SECRET} in {{{{place}}}}: {{{{out}}}}"
    parameters = [given("place", f"the {SECRET}'s garden"), made("out")]
    body = scope | {"template": template, "parameters": parameters, "func_name": "write"}
    first = (await site.post("/v1/semantic_call", body))["param_info"][1]["var_id"]
    query = {name: str(value) for name, value in scope.items()}
    async with site.http.get(f"/v1/semantic_var/{first}", params=query) as response:
        assert SECRET in await response.text()
    source = f"def shout(a, out):\n    raise ValueError('{SECRET}: ' + a)"
    body = scope | {
        "func_name": "shout",
        "func_source": source,
        "parameters": [taken("a", first), made("out")],
    }
    failed = (await site.post("/v1/py_native_call", body))["param_info"][1]["var_id"]
    async with site.http.get(f"/v1/semantic_var/{failed}", params=query) as response:
        assert (response.status, SECRET in await response.text()) == (502, True)
    for date in ("Monday", "Tuesday"):
        messages = [
            {"role": "system", "content": f"On {date} the {SECRET} rests. " * 4},
            {"role": "user", "content": f"Where is the {SECRET}?"},
        ]
        chat = {"model": MODEL, "messages": messages, "prompt_cache_key": "birds"}
        headers = key | {"User-Agent": "OpenAI/Python 1.99.1"}
        assert SECRET in json.dumps(await site.post("/v1/chat/completions", chat, headers=headers))
    sessions = list(site.core.sessions)
    calls = next(session for session in sessions if session.apps == ("letters",)).graph.calls
    found = {"var_id": first, "failed": failed, "request_id": str(next(iter(calls)))}
    return [session.id for session in sessions], found


def paths(site: Site, runs: list[int], found: Mapping[str, str]) -> list[str]:
    """All views, of each run and variable."""
    variables = [found["var_id"], found["failed"]]
    return sorted(
        {
            path.format(session_id=run, **found | {"var_id": var})
            for path in endpoints(site)
            for run in runs
            for var in variables
        }
    )


async def sign_in(site: Site, key: str) -> None:
    await site.post("/ui/api/enter", {"key": key})


@pytest.mark.parametrize("is_over", [False, True])
async def test_no_view_shows_texts_to_others(is_over: bool) -> None:
    async with guarded() as site:
        runs, found = await fill(site)
        if is_over:
            await sign_in(site, "k1")
            for run in runs:
                await site.post(f"/ui/api/sessions/{run}/end", {})
                async with watching(site, "overview") as watch:  # type: ignore[arg-type]
                    while watch.rows.get(f"session:{run}", {}).get("ended_at") is None:
                        await watch.next()
        await sign_in(site, "k1")
        own = {path: await answer(site, path) for path in paths(site, runs, found)}
        assert SECRET in own["/ui/api/overview"][1]
        for path, (status, text) in own.items():
            if str(runs[0]) in path.split("/") and not path.endswith("trace.json"):
                assert (status, SECRET in text) == (200, True), path
        for key in ("k2", KEY):
            await check_others(site, key, own)


async def check_others(site: Site, key: str, own: Mapping[str, tuple[int, str]]) -> None:
    """Open all views with this key, while the tenant has the same views open."""
    await sign_in(site, "k1")
    async with AsyncExitStack() as stack:
        for path, (own_status, _) in own.items():
            if own_status == 200:
                response = await stack.enter_async_context(site.http.get(path))
                await response.content.readline()
        await sign_in(site, key)
        for path, (own_status, _) in own.items():
            status, text = await answer(site, path)
            others_status = 404 if key == "k2" else 403 if "prompt" in path else own_status
            assert status in {own_status, others_status}, (key, path)
            assert SECRET not in text, (key, path, text)
