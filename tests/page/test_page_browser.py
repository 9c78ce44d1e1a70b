"""The page in a real browser."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe

from parrot.gateway.page.visitors import page_key
from parrot.protocol.errors import EngineFailed
from parrot.serve.events import CompletionRetried, EngineJoined
from parrot.serve.graph.nodes import Completion
from tests.page.conftest import TOKEN, Visit
from tests.server.test_serve_http import ENGINE
from tests.support.fake_engine import fake_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all

ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "javascript:alert(1)",
    "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe>",
    "</pre><style>*{display:none}</style>",
    "{{constructor.constructor('alert(1)')()}}",
    "<a href='javascript:alert(1)'>x</a>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "\u202ereversed\u2028line",
]
COPY = "navigator.clipboard.writeText = async (text) => (window.copied = text)"


def saved(path: Path) -> Any:
    """The contents of a downloaded JSON file."""
    return json.loads(path.read_text())


def part(name: str, **binding: Any) -> dict[str, Any]:
    return {"name": name, **binding}


async def submit_map(visit: Visit, width: int, *, equal: bool = True) -> dict[str, Any]:
    """Submit a map of `width` calls and a reduction. Returns the answer of the graph request."""
    calls: list[dict[str, Any]] = [
        {
            "template": "Summarize {{part}}: {{summary}}",
            "func_name": "summarize" if equal else f"summarize_{i}",
            "parameters": [
                part("part", value=f"part {i}"),
                part("summary", is_output=True, var=f"s{i}"),
            ],
        }
        for i in range(width)
    ]
    for start in range(0, width, 250):
        taken = range(start, min(width, start + 250))
        names = [f"p{i}" for i in taken]
        template = "Join: " + " ".join(f"{{{{{name}}}}}" for name in names) + "{{joined}}"
        calls.append(
            {
                "template": template,
                "func_name": "join",
                "parameters": [
                    *(part(name, var=f"s{i}") for name, i in zip(names, taken, strict=True)),
                    part("joined", is_output=True, var=f"joined{start}"),
                ],
            }
        )
    answer: dict[str, Any] = {}
    scope: dict[str, Any] = {"session": {"apps": ["map and join"]}}
    for start in range(0, len(calls), 500):
        request = {"calls": calls[start : start + 500], **scope}
        variables = [{"name": name, "content": "x"} for name in _missing(request["calls"])]
        answer = await visit.site.post("/v1/semantic_graph", request | {"variables": variables})
        if "session" in scope:
            scope = {key: answer[key] for key in ("session_id", "session_auth")}
            first = answer
    return first | {"variables": first["variables"] | answer["variables"]}


def _missing(calls: list[dict[str, Any]]) -> set[str]:
    """Return the inputs of these calls that none of them produces."""
    bound = [p for call in calls for p in call["parameters"] if "var" in p]
    made = {p["var"] for p in bound if p.get("is_output")}
    return {p["var"] for p in bound} - made


async def test_the_page_follows_an_application_to_its_end(visit: Visit) -> None:
    await visit.site.join()
    graph = await submit_map(visit, 3)
    engine, output = visit.site.engine, graph["variables"]["s1"]
    scope = {key: graph[key] for key in ("session_id", "session_auth")}

    async def stream() -> bytes:
        async with visit.site.http.get(f"/v1/semantic_var/{output}/stream", params=scope) as reply:
            return await reply.read()

    streaming = asyncio.create_task(stream())
    read = asyncio.create_task(
        visit.site.get(
            f"/v1/semantic_var/{graph['variables']['joined0']}",
            session_id=graph["session_id"],
            session_auth=graph["session_auth"],
        )
    )
    await visit.site.started(3)
    await visit.open()
    await visit.wait_text("td", "map and join")
    await visit.page.click("text=map and join")
    await visit.wait_text(".node.running", "summarize")
    assert await visit.page.locator(".node").count() == 4
    await visit.page.locator(".node", has_text="join").click()
    await visit.wait_text("aside", "Waits for summarize")

    writing = engine.find("Summarize part 1")
    await visit.page.goto(f"{visit.url}/ui/#/session/{graph['session_id']}/{output}")
    engine.stream(writing, "Once upon")
    await visit.wait_text("pre.value", "Once upon")
    engine.stream(writing, " a time")
    await visit.wait_text("pre.value", "Once upon a time")
    for held in list(engine.held):
        engine.answer(held, "Once upon a time")
    assert b" a time" in await streaming
    await visit.answer("The end")
    assert (await read)["content"] == "The end"
    await visit.page.locator(".node.done", has_text="join").click()
    await visit.wait_text("pre.value", "The end")
    await visit.wait_text(".prompt", "Join: ")
    assert await visit.page.locator(".node.done").count() == 4
    assert await visit.page.locator(".bar-g").count() == 4
    await visit.page.click("text=Template")
    await visit.page.locator(".prompt .link").first.click()
    await visit.wait_text("pre.value", "Once upon a time")


async def test_a_hundred_equal_calls_are_one_node(visit: Visit) -> None:
    graph = await submit_map(visit, 100)
    await visit.open(f"session/{graph['session_id']}")
    await visit.wait_text(".node", "summarize \u00d7100")
    assert await visit.page.locator(".node").count() == 2
    await visit.page.locator(".node", has_text="\u00d7100").click()
    await visit.page.locator("aside tbody tr").nth(99).wait_for()
    assert await visit.page.locator("aside tbody tr").count() == 100


async def test_a_thousand_different_calls_are_drawn(visit: Visit) -> None:
    graph = await submit_map(visit, 1000, equal=False)
    await visit.open(f"session/{graph['session_id']}")
    await visit.page.locator(".node").nth(1003).wait_for()
    assert await visit.page.locator(".node").count() == 1004


async def test_texts_stay_texts(visit: Visit) -> None:
    site = visit.site
    scope = await site.post("/v1/session", {"apps": ATTACKS})
    names = []
    for attack in ATTACKS:
        body = scope | {"var_name": attack, "content": attack}
        names.append((await site.post("/v1/semantic_var", body))["var_id"])
    body = scope | {
        "template": f"{''.join(ATTACKS).replace('{{', '')} {{{{out}}}}",
        "func_name": ATTACKS[0],
        "parameters": [{"name": "out", "is_output": True}],
    }
    output = (await site.post("/v1/semantic_call", body))["param_info"][0]["var_id"]
    await visit.open()
    await visit.wait_text("td", ATTACKS[0])
    for attack, var_id in zip(ATTACKS, names, strict=True):
        await visit.page.goto(f"{visit.url}/ui/#/session/{scope['session_id']}/{var_id}")
        await visit.page.locator("aside h2", has_text=attack[:8].strip()).first.wait_for()
        await visit.page.locator("pre.value", has_text=attack[:8].strip()).wait_for()
        assert await visit.page.locator("pre.value").text_content() == attack
    await visit.page.goto(f"{visit.url}/ui/#/session/{scope['session_id']}/{output}")
    await visit.wait_text(".prompt", ATTACKS[0])
    assert await visit.page.locator("script").count() == 1
    assert await visit.page.locator("img, iframe, style, pre a, .prompt a").count() == 0


async def test_no_update_is_missed_while_the_connection_is_lost(visit: Visit) -> None:
    scope = await visit.site.session()
    await visit.open(f"session/{scope['session_id']}")
    await visit.wait_text("main", "Nothing was called yet")
    await visit.page.context.set_offline(True)
    for name in ("one", "two"):
        await visit.site.call(scope, name)
    await visit.page.context.set_offline(False)
    await visit.site.call(scope, "three")
    await visit.page.locator(".node").nth(2).wait_for(timeout=20_000)
    assert await visit.page.locator(".node").count() == 3
    visit.errors.clear()  # errors of the browser about the lost connection


async def test_the_page_asks_for_the_key_and_removes_it_from_the_address(visit: Visit) -> None:
    await visit.page.goto(f"{visit.url}/ui/")
    await visit.page.fill("#key", "wrong")
    await visit.page.click("button >> text=Sign in")
    await visit.wait_text("[role=alert]", "not the key")
    assert {e for e in visit.errors if "401" not in e} == set()
    visit.errors.clear()
    await visit.open()
    assert "key" not in await visit.page.evaluate("location.href")
    await visit.page.click("text=Sign out")
    await visit.page.wait_for_selector("#key")


async def test_runs_are_ended_and_calls_stopped_after_a_question(visit: Visit) -> None:
    await visit.site.join()
    scope = await visit.site.session()
    output = await visit.site.call(scope, "out")
    read = asyncio.create_task(visit.site.send("GET", f"/v1/semantic_var/{output}", params=scope))
    await visit.site.started(1)
    await visit.open(f"session/{scope['session_id']}/{output}")
    await visit.page.click("aside >> text=Stop\u2026")
    await visit.page.click("dialog[open] >> text=Let it run")
    assert await visit.page.locator(".node.running").count() == 1
    await visit.page.click("aside >> text=Stop\u2026")
    await visit.page.click("dialog[open] >> text=Stop the call")
    await visit.wait_text(".node.stopped", "")
    await visit.wait_text("aside", "Was cancelled")
    assert (await read)[0] == 499
    await visit.page.click("text=End run")
    focused = await visit.page.evaluate("document.activeElement.textContent")
    assert focused == "Keep it running"
    await visit.page.click("dialog[open] >> button.main")
    await visit.page.click("nav >> text=Runs")
    await visit.wait_text("td", "cancelled")


async def test_a_finished_run_stays_until_it_is_deleted(visit: Visit) -> None:
    await visit.site.join()
    scope = await visit.site.post("/v1/session", {"apps": ["newsletter"]})
    output = await visit.site.call(scope, "out")
    read = asyncio.create_task(visit.site.get(f"/v1/semantic_var/{output}", **scope))
    await visit.answer("All the news")
    await read
    unread = await visit.site.call(scope, "unread", output)
    await visit.site.send("DELETE", f"/v1/session/{scope['session_id']}", params=scope)
    await visit.open()
    await visit.wait_text("td", "finished")
    await visit.page.click("text=newsletter")
    await visit.page.locator(".node.done").click()
    await visit.wait_text("pre.value", "All the news")
    await visit.wait_text("aside", "generated")
    await visit.page.locator(".node.skipped").click()
    await visit.wait_text("aside", "Did not run: no reader needed its output.")
    assert await visit.page.locator("aside >> text=Stop\u2026").count() == 0
    assert unread in await visit.page.evaluate("location.hash")
    await visit.page.click("text=Delete\u2026")
    focused = await visit.page.evaluate("document.activeElement.textContent")
    assert focused == "Keep it"
    await visit.page.click("dialog[open] >> button.main")
    await visit.wait_text("h2", "There is no run yet")


async def test_an_ended_run_is_found_by_its_words(visit: Visit) -> None:
    await visit.site.join()
    for number, words in enumerate(("whales and dolphins", "lighthouse keepers")):
        scope = await visit.site.post("/v1/session", {"apps": [f"program {number}"]})
        body = scope | {
            "template": f"Write about {words}. {{{{text}}}}",
            "parameters": [part("text", is_output=True)],
        }
        answer = await visit.site.post("/v1/semantic_call", body)
        output = answer["param_info"][0]["var_id"]
        read = asyncio.create_task(visit.site.get(f"/v1/semantic_var/{output}", **scope))
        await visit.answer("done")
        await read
        await visit.site.send("DELETE", f"/v1/session/{scope['session_id']}", params=scope)
    await visit.open()
    await visit.page.locator("tr.row").nth(1).wait_for()
    await visit.page.keyboard.press("/")
    await visit.page.keyboard.type("keepers")
    await visit.page.locator("tr.row").nth(1).wait_for(state="detached")
    await visit.wait_text("tr.row", "program 1")
    assert "q=keepers" in await visit.page.evaluate("location.hash")
    await visit.page.reload()
    await visit.wait_text("tr.row", "program 1")
    assert await visit.page.locator("tr.row").count() == 1


async def test_a_run_is_saved_and_its_link_opens_for_a_colleague(visit: Visit) -> None:
    await visit.site.join()
    graph = await submit_map(visit, 2)
    output = graph["variables"]["joined0"]
    scope = {key: graph[key] for key in ("session_id", "session_auth")}
    read = asyncio.create_task(visit.site.get(f"/v1/semantic_var/{output}", **scope))
    await visit.site.started(2)
    for held in list(visit.site.engine.held):
        visit.site.engine.answer(held, "A part")
    await visit.answer("All parts")
    await read
    await visit.open(f"run/{graph['session_id']}/{output}")
    files = {}
    for name in ("JSON", "Trace"):
        async with visit.page.expect_download() as download:
            await visit.page.click(f"text={name} >> nth=0")
        file = await download.value
        files[file.suggested_filename] = saved(await file.path())
    assert set(files) == {"map_and_join.json", "map_and_join.perfetto.json"}
    assert "All parts" in files["map_and_join.json"]["texts"]
    events = files["map_and_join.perfetto.json"]["traceEvents"]
    assert any(event["name"].startswith("join") for event in events)

    link = await visit.page.evaluate("location.href")
    assert visit.page.context.browser is not None
    colleague = await (await visit.page.context.browser.new_context()).new_page()
    await colleague.goto(link)
    await colleague.fill("#key", page_key(TOKEN))
    await colleague.click("button >> text=Sign in")
    await colleague.locator("pre.value", has_text="All parts").wait_for()
    await colleague.context.close()


async def test_a_hidden_page_closes_its_feeds(visit: Visit) -> None:
    await visit.open()
    await visit.wait_text("h2", "There is no run yet")
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true})"
    changed = "document.dispatchEvent(new Event('visibilitychange'))"
    closed = visit.page.wait_for_event(
        "requestfailed", lambda request: request.url.endswith("/overview"), timeout=20_000
    )
    waiting = asyncio.ensure_future(closed)
    await visit.page.evaluate(f"{hide % 'true'}; {changed}")
    await waiting
    scope = await visit.site.post("/v1/session", {"apps": ["unseen"]})
    assert await visit.page.locator("tr.row").count() == 0
    await visit.page.evaluate(f"{hide % 'false'}; {changed}")
    await visit.wait_text("tr.row", "unseen")
    assert scope


async def test_an_unknown_run_or_page_says_so(visit: Visit) -> None:
    await visit.open("run/123")
    await visit.wait_text("h1", "There is no such run")
    await visit.wait_text("main", "there is no run 123")
    visit.errors.clear()  # an error of the browser about the answer 404
    await visit.page.goto(f"{visit.url}/ui/#/nosuch")
    await visit.wait_text("h1", "There is no such page")
    assert await visit.page.locator("table").count() == 0


async def test_a_failed_call_does_not_wait_for_an_input(visit: Visit) -> None:
    scope = await visit.site.session()
    failing = await visit.site.call(scope, "first")
    second = await visit.site.call(scope, "second", failing)
    session = visit.site.core.sessions.find(scope["session_id"])
    assert session is not None
    session.graph.variable(failing).fail(EngineFailed("a kernel failed"))
    await visit.open(f"run/{scope['session_id']}/{second}")
    await visit.wait_text("aside", "Did not run, because")
    await visit.wait_text("aside", "a kernel failed")
    assert "Waits for" not in await visit.text("aside")


async def test_the_playground_runs_a_graph_and_gives_its_code(visit: Visit) -> None:
    await visit.site.join()
    await visit.open("playground")
    await visit.wait_text(".code pre", "P.semantic_function")
    source = await visit.page.locator(".code pre").text_content()
    compile(source or "", "playground.py", "exec")
    await visit.page.click("form button.main")
    await visit.site.started(1)
    visit.site.engine.stream(visit.site.engine.held[0], "monkeys,")
    await visit.wait_text("pre.value", "monkeys,")
    await visit.answer("monkeys, parrots and frogs")
    await visit.wait_text("pre.value", "monkeys, parrots and frogs")
    await visit.answer("the parrot")
    await visit.wait_text("pre.value", "the parrot")
    await visit.page.click("text=Open as a run")
    await visit.wait_text(".node.done", "fact")


async def test_a_program_of_the_playground_ends_while_another_view_is_shown(visit: Visit) -> None:
    await visit.site.join()
    await visit.open("playground")
    await visit.page.click("form button.main")
    await visit.page.click("text=Open as a run")
    await visit.wait_text(".node.running", "animals")
    await visit.answer("monkeys")
    await visit.wait_text(".node.running", "fact")
    await visit.answer("the parrot")
    await visit.wait_text(".head .pill", "finished")
    await visit.page.click("nav >> text=Playground")  # The program can be run again.
    await visit.wait_text(".out pre", "Run the calls")


async def test_engines_show_the_load_of_other_clients(visit: Visit) -> None:
    inside = {"Authorization": f"Bearer {TOKEN}"}
    await visit.site.post("/register_engine", {"engine_config": ENGINE}, headers=inside)
    await visit.open("engines")
    await visit.wait_text("article", "e0")
    assert await visit.page.locator("h3", has_text="server").count() == 0
    load = {"num_running": 6, "num_waiting": 2, "num_others": 4, "kv_usage": 0.4}
    info = {"server_load": load}
    beat = {"engine_id": 0, "engine_name": "e0", "runtime_info": info}
    await visit.site.post("/engine_heartbeat", beat, headers=inside)
    for text in ("6 running, 2 waiting", "4 of other clients", "20 % of its KV", "40 %"):
        await visit.wait_text("article", text)


async def test_events_and_tenants_lead_to_sessions(visit: Visit) -> None:
    scope = await visit.site.session()
    output = await visit.site.call(scope, "out")
    events = visit.site.core.events
    events.emit(EngineJoined, fake_engine("e0").info)
    session = visit.site.core.sessions.find(scope["session_id"])
    assert session is not None
    completion = session.graph.variable(output).producer
    assert isinstance(completion, Completion)
    events.emit(CompletionRetried, completion, ATTACKS[0])
    await visit.open("events")
    await visit.wait_text(".kind", "Engine joined")
    shown = await visit.page.locator(".events li").first.locator(".txt").inner_text()
    assert shown == f"{completion.func_name}: {ATTACKS[0]}"
    await visit.page.click("text=Open the call")
    await visit.wait_text("aside .top", "out")
    read = asyncio.create_task(visit.site.get(f"/v1/semantic_var/{output}", **scope))
    await visit.site.join()
    await visit.answer("done")
    await read
    await visit.page.click("nav >> text=Tenants")
    await visit.wait_text("p", "Calls that engines ran")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_accessibility(visit: Visit, scheme: str) -> None:
    await visit.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    graph = await submit_map(visit, 3)
    output = graph["variables"]["joined0"]
    await visit.open()
    session = f"session/{graph['session_id']}/{output}"
    views = ["", session, "placement", "tenants", "events", "playground"]
    for view in views:
        await visit.page.goto(f"{visit.url}/ui/#/{view}")
        await visit.page.wait_for_selector("main h1, aside h2")
        result = await Axe().run(visit.page)
        serious = [
            (found["id"], [node["html"][:120] for node in found["nodes"]])
            for found in result.response["violations"]
            if found["impact"] in ("serious", "critical")
        ]
        assert serious == [], view


async def test_the_page_fits_a_phone(visit: Visit) -> None:
    await visit.page.set_viewport_size({"width": 375, "height": 720})
    graph = await submit_map(visit, 8)
    await visit.open()
    session = f"session/{graph['session_id']}/{graph['variables']['s1']}"
    for view in ("", session, "tenants", "events", "playground"):
        await visit.page.goto(f"{visit.url}/ui/#/{view}")
        await visit.page.wait_for_selector("main h1, main h2")
        widths = await visit.page.evaluate("[document.body.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], view


async def test_a_finished_api_request_has_its_question_and_can_be_deleted(visit: Visit) -> None:
    await visit.site.join()
    request = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 20}
    asking = asyncio.create_task(visit.site.post("/v1/completions", request))
    await visit.answer("Paris.")
    await asking
    await visit.open()
    await visit.page.click("td a")
    await visit.wait_text("h1", "The capital of France is")
    await visit.wait_text(".panel pre.value", "Paris.")  # The only call is open.
    assert await visit.page.locator("text=Compare\u2026").count() == 0
    await visit.page.evaluate(
        "navigator.clipboard.writeText = async (text) => (window.copied = text)"
    )
    await visit.page.click("text=Copy as curl")
    copied = await visit.page.evaluate("window.copied")
    assert "/v1/completions --json @-" in copied
    assert json.loads(copied.split("\n", 1)[1].removesuffix("\nJSON")) == request
    await visit.page.click("text=Delete\u2026")
    await visit.page.click("dialog[open] >> text=Delete run")
    await visit.wait_text("h2", "There is no run yet")
