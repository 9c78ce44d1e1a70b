"""The pictures in the documentation show the page as it is."""

import json

import pytest
from playwright.async_api import Browser

pytest.importorskip("PIL")

from PIL import Image

from tests.page.pictures import FOLDER, MADE_WITH, SCREENS, SIZES, difference, made_with, pictures

pytestmark = pytest.mark.asyncio(loop_scope="module")

_MAX_DIFFERENCE = 0.001  # The share of pixels that may differ.
_MAX_BYTES = 2_000_000  # All pictures together.


async def test_each_screen_has_its_pictures() -> None:
    names = {
        f"{screen}_{size}_{scheme}.png"
        for screen in SCREENS
        for size in SIZES
        for scheme in ("light", "dark")
    }
    assert {path.name for path in FOLDER.glob("*.png")} == names
    assert sum(path.stat().st_size for path in FOLDER.glob("*.png")) < _MAX_BYTES


async def test_the_pictures_are_up_to_date(browser: Browser) -> None:
    if json.loads(MADE_WITH.read_text()) != made_with():
        pytest.skip("the pictures were taken with another browser or other fonts")
    different = {}
    async for name, image in pictures(browser):
        with Image.open(FOLDER / f"{name}.png") as kept:
            if (share := difference(kept, image)) > _MAX_DIFFERENCE:
                different[name] = share
    assert different == {}, "python -m tests.page.pictures"
