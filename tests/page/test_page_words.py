"""Words, labels and bars that must be readable as a whole, on frozen data."""

import pytest
from playwright.async_api import expect

from tests.page import scene
from tests.page.stage import Stage

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one browser for all

RUN = f"run/{scene.RUN}"
# Pairs of labels in the timeline that overlap.
_OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll(".tl .bar-g text")].map((text) =>
    text.getBoundingClientRect());
  return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length;
}"""


@pytest.mark.parametrize(("number", "has_all_labels"), [(2, True), (8, False)])
async def test_labels_of_reused_calls_do_not_cover_each_other(
    stage: Stage, number: int, has_all_labels: bool
) -> None:
    rows = scene.reused_run(8, origin=7)
    for index in range(number):
        at = 0.05 + 0.001 * index
        times = {"ready_s": at, "started_s": at, "finished_s": at}
        name = {"func_name": f"ask_{index}", "outputs": [f"s{index}"]}
        rows[f"call:s{index}"] = rows["call:s0"] | times | name
    stage.answers["sessions/8"] = rows
    await stage.goto("run/8")
    await stage.page.locator(".tl .bar-g").nth(number - 1).wait_for()
    labels = await stage.page.locator(".tl .bar-g text").count()
    assert labels == number if has_all_labels else 0 < labels < number
    assert await stage.page.evaluate(_OVERLAPS) == 0


async def test_a_run_without_duration_has_a_bar_in_the_list(stage: Stage) -> None:
    run = scene.run_row(8, "again", state="finished", shape=[[0, 100, 100, "done"]])
    stage.answers["overview"] = {"service": scene.SERVICE} | {
        "session:8": run | {"ended_at": scene.BEGAN}
    }
    await stage.goto()
    shape = stage.page.locator("svg.shape")
    bar, around = await shape.locator("rect").bounding_box(), await shape.bounding_box()
    assert bar is not None
    assert around is not None
    assert bar["width"] > 2
    assert bar["x"] + bar["width"] <= around["x"] + around["width"] + 0.1


async def test_the_end_of_a_cut_output_is_readable(stage: Stage) -> None:
    rows = scene.run()
    rows["call:text"] = rows["call:text"] | {"finish_reason": "length"}
    stage.answers[f"sessions/{scene.RUN}"] = rows
    await stage.goto(f"{RUN}/text")
    note = stage.page.locator(".io > :last-child .top .faint")
    await expect(note).to_have_text("308 tokens, 79/s, cut at the maximum")
    assert await note.evaluate("(note) => note.scrollWidth <= note.clientWidth")
    details = stage.page.locator(".facts2")
    await expect(details).to_contain_text("308 tokens, cut at the maximum")


async def test_words_in_the_bar_of_the_path_wrap(stage: Stage) -> None:
    rows = scene.run()
    rows["call:verdict"] = rows["call:verdict"] | {"func_name": "review the whole text"}
    stage.answers[f"sessions/{scene.RUN}"] = rows
    await stage.page.set_viewport_size({"width": 760, "height": 800})
    await stage.goto(RUN)
    part = stage.page.locator(".wall button", has_text="review the whole text 13 %")
    await part.wait_for()
    fits = (
        "(part) => [part.scrollWidth <= part.clientWidth, part.scrollHeight <= part.clientHeight]"
    )
    assert await part.evaluate(fits) == [True, True]


async def test_unfolded_requests_stay_unfolded(stage: Stage) -> None:
    page = stage.page
    await stage.goto()
    await page.locator("tr.row", has_text="claude-code").locator("button").click()
    members = page.locator("tr.sub")
    await expect(members).to_have_count(21)
    await stage.goto("engines")
    await page.locator(".tree").wait_for()
    await page.go_back()
    await expect(members).to_have_count(21)
    await stage.goto("events")
    await page.locator(".events").wait_for()
    await page.click("nav >> text=Runs")
    await expect(members).to_have_count(21)


async def test_a_failed_run_is_a_warning_and_names_are_code(stage: Stage) -> None:
    event = scene.events()["event:1"] | {
        "kind": "run failed",
        "text": f"invoices: native function `parse_seeds` failed: {scene.VALUE_ERROR}",
        "engine": "",
    }
    stage.answers["events"] = {"event:run 5": event}
    await stage.goto("events?warning")
    text = stage.page.locator(".events .txt")
    await expect(text).to_have_text(
        f"invoices: native function parse_seeds failed: {scene.VALUE_ERROR}"
    )
    await expect(text.locator("code")).to_have_text("parse_seeds")
    await expect(stage.page.locator(".events svg")).to_have_attribute("aria-label", "warning")
    await expect(stage.page.locator(".bar .seg")).to_contain_text("Warnings1")
