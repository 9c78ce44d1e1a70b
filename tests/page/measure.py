"""How long the page takes to draw a run of 1,000 calls: `python -m tests.page.measure`."""

import asyncio
import sys

from playwright.async_api import async_playwright

from tests.page import scene
from tests.page.stage import open_stage
from tests.support.programs import program

_ROUNDS = 5
_DRAWN = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"


async def measure() -> list[float]:
    """Milliseconds from the click until the first full drawing, in several new pages."""
    chromium = program("chromium", "chromium", "google-chrome")
    times: list[float] = []
    async with async_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu"]
        browser = await playwright.chromium.launch(executable_path=chromium, args=args)
        for _ in range(_ROUNDS):
            stage = await open_stage(browser, is_frozen=False)
            stage.answers["sessions/9"] = scene.large_run()
            await stage.goto("events")
            await stage.page.wait_for_selector(".events")
            await stage.page.evaluate("performance.mark('opened'); location.hash = '#/run/9'")
            await stage.page.locator(".node").nth(999).wait_for(state="attached")
            await stage.page.evaluate(_DRAWN)
            times.append(
                await stage.page.evaluate("performance.measure('drawn', 'opened').duration")
            )
            await stage.page.context.close()
        await browser.close()
    return times


if __name__ == "__main__":
    sys.stdout.write(", ".join(f"{one:.0f} ms" for one in asyncio.run(measure())) + "\n")
