"""All views and states of the page on frozen data, in a real browser without a server."""

import json
import re
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, expect

from tests.page import scene
from tests.page.stage import OPERATOR, URL, Stage, open_stage

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all

RUN = f"run/{scene.RUN}"
# Each view, with a selector of an element that exists after the view is drawn.
VIEWS = {
    "": "table.runs",
    "?failed&q=nothing": ".empty",
    RUN: ".node",
    f"{RUN}/why": ".cutline",
    f"{RUN}/seeds": ".err",
    f"{RUN}/total": ".chain",
    f"{RUN}/notes": ".panel pre",
    f"{RUN}?group=summary_0": ".panel table",
    f"compare/{scene.RUN}/{scene.RUN}": "[aria-label=Comparison] tbody tr",
    "playground": ".code pre",
    "engines": ".tree",
    "tenants": "table",
    "events": ".events",
    "nosuch": ".empty",
}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
COLOURS = ["color-contrast", "link-in-text-block"]  # the rules whose results depend on colours
AXE = Axe()
EMPTY: dict[str, Any] = {"service": scene.SERVICE}
ENGINE = {"engine:0": scene.engine_row("engine-0", "embedded", 0, 8)}
TENANT = {"tenant": "public", "sees_values": True}
SEEN_BY_TENANTS = {
    "engine:0": {
        "engine_id": 0,
        "engine_name": "engine-0",
        "engine_type": "builtin",
        "model": "embedded",
        "default_sampling": None,
        "is_draining": False,
    }
}


async def violations(stage: Stage, rules: list[str] = RULES) -> list[tuple[str, list[str]]]:
    """Return the violations that axe reports, with their elements."""
    if not await stage.page.evaluate("'axe' in window"):
        await stage.page.evaluate(AXE.axe_script)
    found = await stage.page.evaluate(
        """async (rules) => {
          const only = {runOnly: rules, resultTypes: ["violations"]};
          return (await axe.run(document, only)).violations;
        }""",
        rules,
    )
    return [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found]


@pytest.mark.parametrize("width", [1440, 390])
async def test_axe_finds_nothing(browser: Browser, width: int) -> None:
    stage = await open_stage(browser, width=width)

    async def check(view: str) -> None:
        assert await violations(stage) == [], view
        await stage.page.emulate_media(color_scheme="dark")
        assert await violations(stage, COLOURS) == [], f"{view}, dark"
        await stage.page.emulate_media(color_scheme="light")

    for view, drawn in VIEWS.items():
        await stage.goto(view)
        await stage.page.locator(drawn).first.wait_for()
        await check(view)
    await stage.goto(RUN)
    await stage.page.click("text=End run")
    await stage.page.wait_for_selector("dialog[open]")
    await check("the question")
    await stage.page.keyboard.press("Escape")
    for table in ("Variables", "Calls"):
        await stage.page.click(f".box .seg >> text={table}")
        await stage.page.wait_for_selector(f"[aria-label={table}] tbody tr")
        await check(table)
    await stage.page.context.close()
    assert stage.errors == []


async def test_axe_finds_nothing_in_other_states(browser: Browser) -> None:
    hidden = OPERATOR | {"sees_values": False}
    states: list[tuple[str, str, dict[str, Any]]] = [
        ("", ".empty", {"overview": EMPTY | ENGINE}),
        ("", ".bones", {"overview": None}),
        ("", ".notice.bad", {"overview": "lost"}),
        (f"{RUN}/why", ".notice", {"me": hidden}),
        ("run/77", ".empty", {}),
        ("run/9", ".node", {"sessions/9": scene.large_run(100)}),
    ]
    stage = await open_stage(browser)
    for view, drawn, answers in states:
        stage.answers = answers
        await stage.load(view)
        await stage.page.locator(drawn).first.wait_for()
        assert await violations(stage) == [], (view, answers.keys())
    await stage.page.context.close()


async def test_nothing_is_wider_than_the_screen(stage: Stage) -> None:
    for width in (320, 390, 768, 1440):
        await stage.page.set_viewport_size({"width": width, "height": 800})
        for view, drawn in VIEWS.items():
            await stage.goto(view)
            await stage.page.locator(drawn).first.wait_for()
            shown = await stage.page.evaluate("document.documentElement.scrollWidth")
            assert shown <= width, (view, width)


async def test_the_page_asks_no_other_server(stage: Stage) -> None:
    asked: list[str] = []
    stage.page.on("request", lambda request: asked.append(request.url))
    for view, drawn in VIEWS.items():
        await stage.goto(view)
        await stage.page.locator(drawn).first.wait_for()
    assert asked
    assert all(url.startswith("http://parrot.test/ui/") for url in asked)


async def test_titles_name_the_place(stage: Stage) -> None:
    titles = {
        "": "Runs · Parrot",
        RUN: "newsletter · Parrot",
        f"session/{scene.RUN}": "newsletter · Parrot",
        "placement": "Engines · Parrot",
        "nosuch": "Not found · Parrot",
    }
    for view, title in titles.items():
        await stage.goto(view)
        await expect(stage.page).to_have_title(title)


async def test_the_page_can_be_used_with_the_keyboard(stage: Stage) -> None:
    await stage.page.set_viewport_size({"width": 1000, "height": 800})  # No panel opens by itself.
    await stage.goto(RUN)
    page = stage.page
    await page.locator(".node.running").wait_for()
    await page.locator("svg.g").focus()
    await page.keyboard.press("Tab")
    assert await focused(stage) == "why"
    await page.keyboard.press("ArrowLeft")
    assert await focused(stage) == "verdict"
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".panel h2 >> text=review")
    assert await page.evaluate("document.activeElement.className") == "panel"
    await page.keyboard.press("Escape")
    await page.locator(".panel").wait_for(state="detached")
    await expect(page.locator(".node[data-node=verdict]")).to_be_focused()
    await page.keyboard.press("Space")
    await page.wait_for_selector(".panel h2 >> text=review")
    await page.keyboard.press("Escape")
    await stage.goto()
    await page.wait_for_selector("table.runs")
    await page.keyboard.press("/")
    await page.keyboard.type("harbour nonsense")
    await page.wait_for_selector("text=No run matches")


async def focused(stage: Stage) -> Any:
    return await stage.page.evaluate("document.activeElement.dataset.node")


async def test_the_graph_is_moved_and_zoomed(stage: Stage) -> None:
    await stage.page.set_viewport_size({"width": 1000, "height": 800})
    await stage.goto(RUN)
    page = stage.page
    node = page.locator(".node[data-node=verdict]")
    before = await node.bounding_box()
    assert before is not None
    await page.mouse.move(before["x"] + 40, before["y"] + 20)
    await page.mouse.down()
    await page.mouse.move(before["x"] + 140, before["y"] + 50, steps=4)
    await page.mouse.up()
    after = await node.bounding_box()
    assert after is not None
    assert round(after["x"] - before["x"]) == 100
    assert await page.locator(".panel").count() == 0  # A drag that begins on a node opens nothing.
    scale = page.locator(".box header .end > span")
    shown = await scale.inner_text()
    await page.keyboard.down("Control")
    await page.mouse.wheel(0, -100)
    await page.keyboard.up("Control")
    await expect(scale).not_to_have_text(shown)
    await page.get_by_label("Fit to the window").click()
    await expect(scale).to_have_text(shown)
    await node.click()
    await page.wait_for_selector(".panel h2 >> text=review")


async def test_a_call_is_marked_everywhere(stage: Stage) -> None:
    await stage.goto(RUN)
    page = stage.page
    await page.locator(".bar-g[data-call=text]").hover()
    hot = ".hot[data-call=text]"
    for place in (".wall", ".canvas", ".tl"):
        await page.locator(f"{place} {hot}").wait_for()
    await page.click("text=Calls14")
    await page.locator("tr[data-call=text]").hover()
    await page.locator(".canvas .hot[data-node=text]").wait_for()
    await page.locator("tr[data-call=summary_3]").hover()
    await page.locator(".canvas .hot[data-node=summary_0]").wait_for()
    assert await page.locator(".canvas .hot").count() == 1


async def test_equal_variables_are_folded(stage: Stage) -> None:
    await stage.goto(RUN)
    page = stage.page
    await page.click("text=Variables22")
    rows = page.locator("[aria-label=Variables] tbody tr")
    await expect(rows).to_have_count(10)  # page and summary, and eight others
    await page.click("button >> text=summary \u00d77")
    await expect(rows).to_have_count(17)
    await rows.nth(5).locator("button").click()
    await page.wait_for_selector(".panel h2 >> text=summarize")
    await expect(page.locator("tr[data-call=seeds]")).to_contain_text("ValueError: invalid literal")


async def test_a_failure_is_shown_once_with_its_cause(stage: Stage) -> None:
    await stage.goto(f"{RUN}/total")
    panel = stage.page.locator(".panel")
    await panel.locator("text=Did not run, because").wait_for()
    assert await panel.locator(".err").count() == 1
    assert "invalid literal" in await panel.locator(".err").inner_text()
    await panel.locator(".why .as-name").click()
    await stage.page.wait_for_selector(".panel h2 >> text=parse_seeds")
    cause = await stage.page.locator(".blame .cause").inner_text()
    assert cause.startswith("parse_seeds failed: ValueError")


async def test_the_first_sentence_says_where_the_time_went(stage: Stage) -> None:
    await stage.goto(RUN)
    sentence = stage.page.locator(".blame p").last
    await expect(sentence).to_contain_text(
        "61 % of 20.2 s were spent in summarize → combine → review"
    )
    await expect(sentence).to_contain_text(
        "24 % passed in your program in 2 parts, mostly before it set notes"
    )
    bar = await stage.page.locator(".wall > *").all_inner_texts()
    assert [text for text in bar if text] == [
        "summarize 26 %",
        "combine 23 %",
        "review 13 %",
        "your program 23 %",
        "why 14 %",
    ]


async def test_two_runs_are_compared(stage: Stage) -> None:
    earlier = scene.run_row(
        8, "newsletter", state="finished", created_at=scene.BEGAN, ended_at=scene.BEGAN + 25.2
    )
    facts = {"cached_tokens": 0, "computed_tokens": 70, "output_tokens": 22}
    calls = {
        f"call:s{n}": scene.call_row(f"s{n}", "summarize", [], finished_s=6.2, **facts)
        for n in range(2)
    }
    stage.answers["sessions/8"] = {"session": earlier} | calls
    latest = earlier | {"id": 9}
    stage.answers["sessions/9"] = {"session": latest}
    stage.answers["overview"] = scene.overview() | {"session:8": earlier, "session:9": latest}
    await stage.goto(RUN)
    await stage.page.click("text=Compare")
    await expect(stage.page).to_have_url(f"http://parrot.test/ui/#/compare/9/{scene.RUN}")
    choice = stage.page.get_by_label("With the run")
    await choice.focus()
    await choice.select_option("8")
    await expect(stage.page).to_have_url(f"http://parrot.test/ui/#/compare/8/{scene.RUN}")
    await expect(choice).to_be_focused()
    rows = stage.page.locator("[aria-label=Comparison] tbody tr")
    await expect(rows.nth(1)).to_contain_text("+12")  # More calls. Run 9 has none.
    lines = await rows.all_inner_texts()
    cells = {name: rest for name, *rest in (line.split("\t") for line in lines)}
    assert cells["Time"] == ["25.2 s", "20.2 s", "\u22125.0 s"]
    assert cells["Calls"] == ["2", "14", "+12"]
    assert cells["From cache"] == ["0 %", "51 %", "+51 points"]
    assert cells["summarize"] == [
        "12.0 s\nsum of 2 calls, 0 % cached\n",
        "26.1 s\nsum of 7 calls, 43 % cached\n",
        "+14.1 s",
    ]


async def test_a_run_with_reused_results_is_explained(stage: Stage) -> None:
    rows = scene.reused_run(8, origin=7)
    stage.answers |= {"sessions/8": rows, "sessions/8/vars/s0": {"var": rows["var:s0"]}}
    await stage.goto("run/8")
    explanation = stage.page.locator(".blame")
    await expect(explanation).to_contain_text(
        "2 of 2 calls took the result of an identical call, so their prompts count as cached. "
    )
    await expect(explanation).to_contain_text(
        "The run took 1,458 of 1,458 prompt tokens from the cache."
    )
    totals = await stage.page.locator(".totals").inner_text()
    assert "Output\n0 tokens\nFrom cache\n100 %" in totals
    await expect(stage.page.locator(".node .d").first).to_have_text("reused · 40 ms")
    await expect(stage.page.locator(".tl .lane").first).to_have_text("reusedreused")
    bar = stage.page.locator(".tl .bar-g").first
    await expect(bar).to_have_attribute("aria-label", "ask: from 20 ms to 60 ms; reused")
    await bar.click()
    panel = stage.page.locator(".panel")
    await expect(panel.locator(".why")).to_have_text(
        "Took the result of an identical call of best-of-n (Today, 17:12:45) in 40 ms."
    )
    await expect(panel.locator(".why a")).to_have_attribute("href", "#/run/7")
    await expect(panel.locator(".facts2")).to_contain_text("729 tokens, not computed again")
    await stage.page.click(".box .seg >> text=Calls")
    cells = stage.page.locator("[aria-label=Calls] tbody tr").first.locator("td")
    assert (await cells.all_inner_texts())[1:] == [
        *("reused", "20 ms", "0 ms", "40 ms", "729", "100 %", "")
    ]


async def test_legends_name_only_drawn_items(stage: Stage) -> None:
    await stage.goto(RUN)
    key = stage.page.locator(".canvas .key")
    await expect(key).to_have_text("critical pathwaitsfailed because of")
    await expect(stage.page.locator(".tl-legend")).to_have_text(
        "queuedprefillgeneratingcritical pathyour programrunningfailed"
    )
    stage.answers["sessions/8"] = scene.reused_run(8, origin=7)
    await stage.goto("run/8")
    await expect(stage.page.locator(".tl-legend")).to_contain_text("reused")
    await expect(key).to_have_text("")


async def test_a_chat_request_is_copied_as_a_chat_request(stage: Stage) -> None:
    rows = scene.reused_run(8, origin=7)
    rows["session"] |= {"kind": "API", "apps": [], "app": "openai", "words": "Why?"}
    rows["call:s0"] |= {"func_name": "chat"}
    call = {"prompt": [{"text": "Why?"}], "sampling": {"max_gen_length": 20}}
    shown = {"var": rows["var:s0"], "call": call, "text:0": {"text": "an answer"}}
    stage.answers |= {"sessions/8": rows, "sessions/8/vars/s0": shown}
    await stage.goto("run/8/s0")
    await expect(stage.page).to_have_title("Why? · Parrot")
    await expect(stage.page.locator(".crumb")).to_contain_text("openai")
    await expect(stage.page.locator(".head")).to_contain_text("Delete")
    await expect(stage.page.locator(".prompt")).to_contain_text("editor of a small newsletter")
    await stage.page.evaluate(
        "document.execCommand = () => (window.copied = document.activeElement.value)"
    )
    await stage.page.click("text=Copy as curl")
    copied = await stage.page.evaluate("window.copied")
    command, body = copied.split("\n", 1)
    assert command == f"curl -s {URL}/v1/chat/completions --json @- <<'JSON'"
    sent = json.loads(body.removesuffix("\nJSON"))
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert sent["messages"][1]["content"].startswith("Here is the issue:\n\n" + scene.STORY)
    assert (sent["model"], sent["max_tokens"], len(sent)) == ("qwen3-8b", 20, 3)


async def test_cut_texts_have_a_tooltip(stage: Stage) -> None:
    await stage.page.set_viewport_size({"width": 1000, "height": 900})
    await stage.goto()
    words = stage.page.locator("td .cut .cut").first
    await words.evaluate("(element) => { element.title = ''; element.style.width = '40px'; }")
    await words.hover()
    await expect(words).to_have_attribute("title", await words.inner_text())


async def test_many_calls_after_each_other_are_counted(stage: Stage) -> None:
    stage.answers["sessions/9"] = scene.large_run(300)
    await stage.goto("run/9")
    sentence = stage.page.locator(".blame p").last
    await expect(sentence).to_contain_text("were spent in 8 calls one after the other.")
    await expect(sentence).to_contain_text(
        "passed in your program in 8 parts, mostly after its last call"
    )


async def test_the_prompt_is_shown_as_the_model_saw_it(stage: Stage) -> None:
    await stage.goto(f"{RUN}/why")
    prompt = stage.page.locator(".prompt")
    await expect(prompt.locator(".cutline")).to_contain_text("218 tokens from the KV cache")
    assert await prompt.locator(".turn").all_inner_texts() == [
        "system\nYou are the editor of a small newsletter. Answer in plain English.",
        f"user\nHere is the issue:\n\n{scene.STORY}\n\nVerdict: Yes.",
        f"user, continued\n\nNotes of the editor: {scene.NOTES}\n\nWhy? Answer in two sentences.",
        f"output\n{scene.WHY}",
    ]
    await stage.page.locator("dd >> text=2.9 s on engine-0, 4.1 s on engine-1").wait_for()
    inputs = await stage.page.locator(".io > :first-child .val .mono").all_inner_texts()
    assert inputs == ["text", "verdict", "notes"]


async def test_a_call_is_run_again_in_the_playground(stage: Stage) -> None:
    await stage.goto(f"{RUN}/why")
    await stage.page.wait_for_selector(".cutline")
    await stage.page.wait_for_selector("pre >> text=Keep it light")
    await stage.page.click(".panel >> text=Open in the playground")
    system = stage.page.get_by_label("System message of call 1")
    await expect(system).to_have_value(scene.SYSTEM)
    call = stage.page.get_by_label("Prompt of call 1")
    await expect(call).to_have_value(
        "Here is the issue:\n\n{{text}}\n\nVerdict: {{verdict}}\nNotes of the editor: {{notes}}"
        "\n\nWhy? Answer in two sentences."
    )
    assert await stage.page.locator(".call .msg textarea").first.input_value() == scene.STORY
    assert await stage.page.get_by_label("Temperature").input_value() == "0"
    assert await stage.page.get_by_label("Max tokens").input_value() == "120"
    assert await stage.page.get_by_role("switch").is_checked()
    origin = stage.page.get_by_role("link", name="The run it is from")
    await expect(origin).to_have_attribute("href", f"#/{RUN}")


async def test_the_page_explains_why_a_run_cannot_be_opened(stage: Stage) -> None:
    await stage.goto(RUN)
    button = stage.page.locator(".head button >> text=Open in the playground")
    await expect(button).to_be_disabled()
    await expect(button).to_have_attribute("title", re.compile("calls without Python functions"))


async def test_a_long_input_leaves_room_for_the_calls(stage: Stage) -> None:
    await stage.goto("playground")
    text = stage.page.locator("[aria-label=Inputs] textarea").first
    await text.fill("The harbour has three piers.\n" * 100)
    box = await text.bounding_box()
    assert box is not None
    assert box["height"] <= 150


async def test_a_small_run_is_run_again_in_the_playground(stage: Stage) -> None:
    rows = scene.run()
    names = ("text", "verdict", "headline", *(f"summary_{number}" for number in range(7)))
    kept = {f"{kind}:{name}" for kind in ("call", "var") for name in names}
    kept |= {"session", *(f"var:page_{number}" for number in range(7))}
    stage.answers[f"sessions/{scene.RUN}"] = {key: rows[key] for key in rows if key in kept}
    await stage.goto(RUN)
    await stage.page.click(".head >> text=Open in the playground")
    calls = stage.page.locator("section.call[aria-label^=Call]")
    await expect(calls).to_have_count(10)
    prompts = [await one.input_value() for one in await stage.page.get_by_label("Prompt of").all()]
    assert prompts[1] == "Summarize this in one sentence: {{page_2}}"
    assert prompts[7].startswith("Summarize this in one sentence: {{summary}}{{summary_2}}")
    values = [
        await one.input_value()
        for one in await stage.page.locator("[aria-label=Inputs] textarea").all()
    ]
    assert values == scene.FACTS


async def test_runs_are_searched_filtered_sorted_and_folded(stage: Stage) -> None:
    page = stage.page
    await stage.goto("?q=9,003")
    rows = page.locator("tr.row")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("contract-review")
    await stage.goto("?failed")
    await expect(rows).to_have_count(2)
    await stage.goto()
    groups = await page.locator("tr.group").all_inner_texts()
    assert groups == ["Now", "Today", "Yesterday"]
    folded = page.locator("tr.row", has_text="claude-code")
    await expect(folded).to_contain_text("Anthropic API")
    await expect(folded).to_contain_text("28 requests; the last: Refactor the retry loop")
    await folded.locator("button").click()
    await expect(page.locator("tr.sub")).to_have_count(21)  # 20 requests, and how many are left
    cells = await page.locator("tr.sub").nth(1).locator("td").all_inner_texts()
    assert cells[2:] == [
        "1",
        "26k",
        "782",
        "94 %",
        "4.2 s",
        "$0.0094",
        "ci-bot",
        "18:01:51",
    ]
    await page.click("th button >> text=Calls")
    assert "sort=calls" in page.url
    await expect(rows.first).to_contain_text("nightly-eval")
    await page.get_by_label("Kind").select_option("API")
    assert "kind=API" in page.url
    await expect(page.locator("tr.row:not(.sub)")).to_have_count(2)


async def test_each_filter_shows_its_number_of_runs(stage: Stage) -> None:
    await stage.goto()
    filters = stage.page.locator(".bar .seg button")
    await expect(filters).to_have_text(["All36", "Running4", "Finished30", "Failed2", "Cancelled1"])
    rows = stage.page.locator("tr.row")
    for name, number in (("Finished", 4), ("Failed", 2), ("Cancelled", 1)):
        await filters.get_by_text(name).click()
        await expect(rows).to_have_count(number)
    await filters.get_by_text("Finished").click()
    note = stage.page.locator("div.note p").last
    await expect(note).to_contain_text("4 rows with 30 runs: API requests of one client share")


async def test_the_list_explains_folding_and_retention(stage: Stage) -> None:
    await stage.goto()
    note = stage.page.locator("div.note p").last
    await expect(note).to_contain_text(
        "9 rows with 36 runs: API requests of one client share a row"
    )
    await expect(note).to_contain_text("The last 50 finished runs are kept, each for 24 h.")
    stage.answers["overview"] = scene.overview() | {"service": scene.SERVICE | {"max_runs": 0}}
    await stage.page.reload()
    await expect(note).to_contain_text("Finished runs are not kept")


async def test_rows_show_the_cause_of_a_failure_and_the_time_of_requests(stage: Stage) -> None:
    rows = {
        1: {
            "state": "failed",
            "failed": 1,
            "error": f"native function `parse_seeds` failed: {scene.VALUE_ERROR}",
        },
        2: {"kind": "API", "functions": ["chat"], "busy_s": 1.25, "words": "Name three birds."},
        3: {"kind": "API", "functions": ["chat"], "busy_s": 0.5, "words": "Name four birds."},
    }
    apps = {1: "invoices", 2: "openai", 3: "openai"}
    stage.answers["overview"] = EMPTY | {
        f"session:{run}": scene.run_row(run, apps[run], created_at=scene.BEGAN - run, **fields)
        for run, fields in rows.items()
    }
    await stage.goto()
    failed, requests = (stage.page.locator("tr.row").nth(number) for number in range(2))
    await expect(failed).to_contain_text(f"parse_seeds: {scene.VALUE_ERROR}")
    await expect(requests).to_contain_text("OpenAI API")
    await expect(requests).to_contain_text("2 requests; the last: Name three birds.")
    await expect(requests).to_contain_text("1.8 s")


async def test_the_first_token_is_that_of_the_last_calls(stage: Stage) -> None:
    steps = scene.series()
    quiet = {
        f"step:{number}": steps[f"step:{number}"] | {"first_token_s": None} for number in (58, 59)
    }
    steps["step:57"] |= {"first_token_s": 0.25}
    stage.answers["series"] = steps | quiet
    await stage.goto()
    tile = stage.page.locator(".tile", has_text="First token").locator(".v")
    await expect(tile).to_have_text("0.3 s median, 20 s ago")


async def test_irreversible_actions_need_confirmation(stage: Stage) -> None:
    page = stage.page
    actions = {
        RUN: ("text=End run", "Keep it running", f"sessions/{scene.RUN}/end"),
        f"{RUN}/why": (".panel >> text=Stop", "Let it run", f"sessions/{scene.RUN}/cancel/13"),
        "engines": ("text=Drain >> nth=0", "Keep it serving", "engines/0/drain"),
    }
    for view, (button, harmless, path) in actions.items():
        await stage.goto(view)
        await page.click(button)
        await expect(page.locator("dialog[open] [autofocus], dialog[open] :focus")).to_have_text(
            harmless
        )
        await page.keyboard.press("Enter")
        await expect(page.locator("dialog[open]")).to_have_count(0)
        assert stage.posted == [], view
        await page.click(button)
        async with page.expect_response(f"**/{path}"):
            await page.click("dialog[open] button.main")
        await expect(page.locator("dialog[open]")).to_have_count(0)
        assert [posted for posted, _ in stage.posted] == [path]
        stage.posted.clear()


async def test_a_page_without_tls_can_copy(stage: Stage) -> None:
    await stage.goto(f"{RUN}/notes")
    button = stage.page.get_by_label("Copy notes")
    await button.click()
    await expect(stage.page.locator("[role=status]")).to_have_text("Copied notes")
    await expect(button).to_be_focused()
    await stage.goto("playground")
    await stage.page.get_by_label("Prompt of call 1").fill("")
    await stage.page.keyboard.press("Control+v")
    assert await stage.page.get_by_label("Prompt of call 1").input_value() == scene.NOTES


async def test_a_phone_shows_the_panel_as_a_sheet(browser: Browser) -> None:
    stage = await open_stage(browser, width=390)
    await stage.goto(RUN)
    page = stage.page
    await page.locator(".node").first.wait_for()
    assert await page.locator(".panel").count() == 0
    await page.locator(".node.failed").click()
    box = await page.locator(".panel").bounding_box()
    assert box is not None
    assert (box["x"], box["width"]) == (0, 390)
    assert 60 < box["y"] < 200
    await page.locator(".scrim").click(position={"x": 20, "y": 20})
    await expect(page.locator(".panel")).to_have_count(0)
    await page.context.close()


async def test_states_without_data(browser: Browser) -> None:
    states: list[tuple[str, dict[str, Any], str]] = [
        ("", {"overview": EMPTY | ENGINE}, "There is no run yet"),
        ("", {"overview": "lost"}, "No answer from parrot.test"),
        ("engines", {"overview": EMPTY, "placement": {}}, "No engine has registered"),
        ("events", {"events": {}}, "Nothing has happened yet"),
        ("tenants", {"usage": {}}, "No call has completed yet"),
        ("run/77", {}, "There is no such run"),
        ("run/8", {"sessions/8": {"session": scene.run_row(8, "new")}}, "Nothing was called yet"),
        (f"{RUN}/why", {"me": OPERATOR | {"sees_values": False}}, "belong to tenant public"),
        ("", {"me": TENANT, "overview": EMPTY | SEEN_BY_TENANTS, "series": {}}, "There is no run"),
        ("engines", {"me": TENANT, "overview": EMPTY | SEEN_BY_TENANTS, "series": {}}, "serving"),
    ]
    stage = await open_stage(browser)
    for view, answers, words in states:
        stage.answers = answers
        await stage.load(view)
        await stage.page.locator(f"text={words}").first.wait_for()
        shown = await stage.page.inner_text("main")
        assert "undefined" not in shown, view
        assert "NaN" not in shown, view
        if answers.get("me") == TENANT:
            assert "Drain" not in shown
    await stage.page.context.close()


async def test_a_thousand_calls_and_their_timeline_are_drawn(stage: Stage) -> None:
    """`python -m tests.page.measure` measures the time."""
    stage.answers["sessions/9"] = scene.large_run()
    await stage.goto("run/9")
    await stage.page.locator(".node").nth(999).wait_for(state="attached")
    assert await stage.page.locator(".node").count() == 1000
    assert await stage.page.locator(".edge").count() > 1800
    assert await stage.page.locator(".bar-g").count() == 1000
