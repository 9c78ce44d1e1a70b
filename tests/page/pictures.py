"""Take pictures of the page for the documentation, with frozen data.

    python -m tests.page.pictures

Each of the six screens is in docs/page four times: on a desktop and on a phone, light and dark.
`made_with.json` names the browser and the fonts, because the pictures depend on both."""

import asyncio
import io
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from PIL import Image, ImageChops
from playwright.async_api import Browser, async_playwright

from tests.page import scene
from tests.page.stage import open_stage
from tests.support.programs import chromium

FOLDER = Path(__file__).parents[2] / "docs/page"
MADE_WITH = FOLDER / "made_with.json"
# Each screen, its address, and elements that exist after it is drawn.
SCREENS = {
    "runs": ("", ("table.runs", ".spark", ".pip")),
    "run": (
        f"run/{scene.RUN}/why",
        (".cutline", "pre >> text=Keep it light", "dd >> text=4.1 s on engine-1", ".pip"),
    ),
    "playground": ("playground", (".code pre", "select >> text=qwen3-8b", ".pip")),
    "engines": ("engines", (".tree", ".spark", ".pip")),
    "tenants": ("tenants", ("tbody tr", ".pip")),
    "events": ("events", (".events", "text=Resume")),
}
SIZES = {"desktop": 1440, "phone": 390}
_COLOURS = 256
_NOTICEABLE = 24  # Difference of a channel, of 255, that counts.


def made_with() -> dict[str, str]:
    """Return the browser and the fonts of this machine."""
    commands = {
        "browser": [chromium(), "--version"],
        "sans": ["fc-match", "sans-serif"],
        "mono": ["fc-match", "monospace"],
    }
    found = {}
    for name, command in commands.items():
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        found[name] = done.stdout.strip()
    return found


async def pictures(browser: Browser) -> AsyncIterator[tuple[str, Image.Image]]:
    """Yield all pictures with their names."""
    for size, width in SIZES.items():
        for scheme in ("light", "dark"):
            stage = await open_stage(browser, width=width, scheme=scheme)
            for screen, (view, drawn) in SCREENS.items():
                is_sheet = screen == "run" and size == "phone"
                await stage.goto(view.removesuffix("/why") if is_sheet else view)
                for element in (".node", ".pip") if is_sheet else drawn:
                    await stage.page.locator(element).first.wait_for(state="attached")
                png = await stage.page.screenshot(animations="disabled", caret="hide")
                yield f"{screen}_{size}_{scheme}", reduced(png)
            await stage.page.context.close()


def reduced(png: bytes) -> Image.Image:
    """Reduce the colours of a picture, so that its file is small."""
    with Image.open(io.BytesIO(png)) as image:
        return image.convert("RGB").quantize(
            _COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
        )


def difference(one: Image.Image, other: Image.Image) -> float:
    """Return the share of pixels that are noticeably different."""
    if one.size != other.size:
        return 1.0
    channels = ImageChops.difference(one.convert("RGB"), other.convert("RGB")).split()
    worst = ImageChops.lighter(ImageChops.lighter(channels[0], channels[1]), channels[2])
    histogram = worst.histogram()
    return sum(histogram[_NOTICEABLE:]) / sum(histogram)


async def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    async with async_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu"]
        browser = await playwright.chromium.launch(executable_path=chromium(), args=args)
        async for name, image in pictures(browser):
            image.save(FOLDER / f"{name}.png", optimize=True)
        await browser.close()
    MADE_WITH.write_text(json.dumps(made_with(), indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(write())
