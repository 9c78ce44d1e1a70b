"""Show the page with frozen data: a browser gets the real files, and the feeds of `scene`.

No server runs, and the browser's clock is stopped, so pictures are reproducible."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, Page, Route

from parrot.gateway.page.endpoints import _HEADERS
from tests.page import scene

STATIC = Path(__file__).parents[2] / "parrot/gateway/page/static"
URL = "http://parrot.test"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
OPERATOR = {"tenant": None, "sees_values": True}


def feed(rows: Mapping[str, Any]) -> str:
    """Return the answer of a feed with these rows."""
    changes = {"version": "frozen-1", "whole": True, "rows": rows, "gone": []}
    return f"event: changes\ndata: {json.dumps(changes)}\n\n"


@dataclass
class Stage:
    """A page whose requests are answered from `scene`."""

    page: Page
    errors: list[str] = field(default_factory=list)
    posted: list[tuple[str, Any]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    """Rows of feeds by path, instead of those of the scene. None: the feed does not answer."""

    async def goto(self, view: str = "") -> None:
        await self.page.goto(f"{URL}/ui/#/{view}")

    async def load(self, view: str = "") -> None:
        """Like `goto`, but clears the memory of the page. A new page of the browser would take 1 s
        of CPU time."""
        await self.page.goto("about:blank")
        await self.goto(view)

    def _rows(self, path: str) -> Any:
        if path in self.answers:
            return self.answers[path]
        run = f"sessions/{scene.RUN}"
        if path.startswith(f"{run}/vars/"):
            return scene.variable(path.rpartition("/")[2])
        known = {
            "overview": scene.overview,
            "placement": scene.placement,
            "series": scene.series,
            "usage": scene.usage,
            "events": scene.events,
            run: scene.run,
        }
        return known[path]() if path in known else "missing"

    async def answer(self, route: Route) -> None:
        url = urlsplit(route.request.url)
        name = url.path.removeprefix("/ui/")
        if not name.startswith("api/"):
            file = STATIC / (name or "index.html")
            headers = _HEADERS | {"Content-Type": _TYPES[file.suffix]}
            await route.fulfill(body=file.read_bytes(), headers=headers)
            return
        path = name.removeprefix("api/")
        if route.request.method == "POST":
            self.posted.append((path, route.request.post_data_json))
            await route.fulfill(json={})
            return
        if path == "me":
            await route.fulfill(json=self.answers.get("me", OPERATOR))
            return
        if path.endswith("/prompt"):
            await route.fulfill(json=scene.prompt())
            return
        rows = self._rows(path)
        if rows is None:
            return  # The browser waits.
        if rows == "lost":
            await route.abort()
        elif rows == "missing":
            error = {"error": {"message": f"there is no run {path.rpartition('/')[2]}"}}
            await route.fulfill(status=404, json=error)
        else:
            await route.fulfill(body=feed(rows), headers={"Content-Type": "text/event-stream"})


# The answer of a feed ends at once. The page must not treat this as a lost connection.
_QUIET = """
const Source = window.EventSource;
window.EventSource = class extends Source {
  addEventListener(name, act) {
    super.addEventListener(name, name === "error" ? (event) => {
      if (event.data !== undefined || !this.gotRows) act(event); else this.close();
    } : (event) => { this.gotRows = true; performance.mark("rows"); act(event); });
  }
};
"""


async def open_stage(
    browser: Browser, *, width: int = 1440, scheme: str = "light", is_frozen: bool = True
) -> Stage:
    """Open a page. With `is_frozen`, the clock of the page is stopped."""
    height = 900 if width > 720 else 844
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        timezone_id="UTC",
        locale="en-GB",
        reduced_motion="reduce",
        device_scale_factor=1,
        has_touch=width < 720,
    )
    page = await context.new_page()
    if is_frozen:
        await page.clock.set_fixed_time(scene.NOW)  # Timers still run.
    await page.add_init_script(_QUIET)
    stage = Stage(page)
    page.on("pageerror", lambda error: stage.errors.append(str(error)))
    page.on(
        "console",
        lambda message: (
            stage.errors.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    await context.route("**/*", stage.answer)
    return stage
