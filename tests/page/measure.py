"""How long the page takes to draw a run of 1,000 calls: `python -m tests.page.measure`.

Two times in milliseconds: until the graph was drawn, and until the timeline was drawn as well."""

import asyncio
import sys

from playwright.async_api import async_playwright

from tests.page import scene
from tests.page.stage import open_stage
from tests.support.programs import chromium

_ROUNDS = 5
# Open the run, and resolve with the two times.
_OPEN = """
async () => {
  const began = performance.now();
  location.hash = "#/run/9";
  const times = [];
  for (const element of [".node", ".bar-g"]) {
    while (document.querySelectorAll(element).length < 1000) {
      await new Promise((done) => requestAnimationFrame(done));
    }
    await new Promise((done) => setTimeout(done));
    times.push(performance.now() - began);
  }
  return times;
}
"""


async def measure() -> list[tuple[float, float]]:
    """Return the milliseconds from the click to the graph and to the timeline, for several
    pages."""
    times: list[tuple[float, float]] = []
    async with async_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu"]
        browser = await playwright.chromium.launch(executable_path=chromium(), args=args)
        for _ in range(_ROUNDS):
            stage = await open_stage(browser, is_frozen=False)
            stage.answers["sessions/9"] = scene.large_run()
            await stage.goto("events")
            await stage.page.wait_for_selector(".events")
            graph, both = await stage.page.evaluate(_OPEN)
            times.append((graph, both))
            await stage.page.context.close()
        await browser.close()
    return times


if __name__ == "__main__":
    sys.stdout.write(
        ", ".join(f"{graph:.0f} and {both:.0f} ms" for graph, both in asyncio.run(measure())) + "\n"
    )
