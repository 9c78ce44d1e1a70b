"""The page, open in Chromium for an hour, with simulated engines under constant load.

    python -m benchmark.soak.soak_page --output benchmark/results/page_soak.json

Four tabs stay open: the runs, a run's graph, a value that grows while its program does not read it,
and the engines. In each round a new program runs, and the network between the browser and
ServeCore breaks. Then an engine is drained in one round and resumed in the next. A round ends when
every tab shows exactly the results of the program. If a tab does not within 30 s, an update was
lost and the round fails. Memory is ServeCore's resident set, and the page's heap after a garbage
collection. `growth` is the median of the last third of the samples, divided by the median of the
second third. `longest_s` is the longest time from the program's end until all tabs were correct.
"""

import argparse
import asyncio
import re
import shutil
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from parrot.cluster import Cluster
from parrot.gateway.page.visitors import page_key
from parrot.protocol.http import HttpClient
from parrot.utils.tasks import TaskSet

ENGINE = {"engine_type": "sim", "instance": {"step_s": 0.01}}
SAMPLING = {"temperature": 0.0, "max_gen_length": 60}
WIDTH = 6  # Calls that are joined.
_BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
_PATIENCE_S = 30.0
_NUM_SAMPLES = 30
_MIN_ROUNDS = 2  # One round drains, the next resumes.
_CHUNK = 2**16
_MIB = 2**20


class Breaks:
    """A TCP proxy between the browser and ServeCore that can break connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks = TaskSet()
        self._writers: set[asyncio.StreamWriter] = set()

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.spawn(self._carry(source, sink))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        self._writers.add(sink)
        with suppress(ConnectionError):
            while chunk := await source.read(_CHUNK):
                sink.write(chunk)
                await sink.drain()
        self._writers.discard(sink)
        sink.close()

    def cut(self) -> int:
        """Break all connections and return their number."""
        for writer in self._writers:
            writer.transport.abort()
        return len(self._writers) // 2

    async def close(self) -> None:
        self.cut()
        await self._tasks.close()


@dataclass
class Soak:
    """The open tabs and the measurements so far."""

    cluster: Cluster
    http: HttpClient
    breaks: Breaks
    url: str
    tabs: list[Page]
    errors: list[str] = field(default_factory=list)
    num_rounds: int = 0
    num_cut: int = 0
    longest_s: float = 0.0

    async def round(self) -> None:
        """Run one round. Raises Chromium's error if a tab does not become correct."""
        runs, graph, value, engines = self.tabs
        scope = await self.http.request("POST", "/v1/session", body={"apps": ["soak"]})
        names = [f"s{n}" for n in range(WIDTH)]
        calls = [_call("part", f"Summarize part {n}: ", name) for n, name in enumerate(names)]
        calls.append(_call("join", "Join: ", "joined", names))
        answer = await self.http.request(
            "POST", "/v1/semantic_graph", body=scope | {"calls": calls, "variables": []}
        )
        session, watched = scope["session_id"], answer["variables"]["s0"]
        await graph.goto(f"{self.url}/ui/#/run/{session}")
        await value.goto(f"{self.url}/ui/#/run/{session}/{watched}")
        joined = asyncio.create_task(self._read(answer["variables"]["joined"], scope))
        await value.locator("pre.value", has_text=" ").wait_for(timeout=1e3 * _PATIENCE_S)
        self.num_cut += self.breaks.cut()
        await self._drain(engines)
        await joined
        ended = time.monotonic()
        text = await self._read(watched, scope)
        await _wait(graph, "s => document.querySelectorAll('.node.done').length == s", 2)
        await _wait(value, "s => document.querySelector('pre.value')?.textContent == s", text)
        row = runs.locator("tr", has=runs.locator(f"a[href='#/run/{session}']"))
        done = row.locator("td", has_text=re.compile(rf"^{WIDTH + 1} calls$"))
        await done.wait_for(timeout=1e3 * _PATIENCE_S)
        self.longest_s = max(self.longest_s, time.monotonic() - ended)
        await self.http.request("DELETE", f"/v1/session/{session}", bearer=scope["session_auth"])
        await row.filter(has_text="finished").wait_for(timeout=1e3 * _PATIENCE_S)
        self.num_rounds += 1

    async def _read(self, var_id: str, scope: dict[str, Any]) -> str:
        params = {key: str(given) for key, given in scope.items()}
        path = f"/v1/semantic_var/{var_id}"
        answer = await self.http.request("GET", path, params=params, timeout_s=600.0)
        content: str = answer["content"]
        return content

    async def _drain(self, engines: Page) -> None:
        """Drain the first engine, or resume it."""
        is_resumed = self.num_rounds % 2 == 1
        wanted, state = ("Resume", "serving") if is_resumed else ("Drain\u2026", "drain")
        card = engines.locator("article").first
        await card.get_by_role("button", name=wanted).click()
        if not is_resumed:  # The page asks first.
            await engines.locator("dialog[open] button.main").click()
        await card.locator(".pill", has_text=state).wait_for(timeout=1e3 * _PATIENCE_S)

    async def memory(self) -> dict[str, float]:
        """MiB."""
        heap = 0.0
        for tab in self.tabs:
            session = await tab.context.new_cdp_session(tab)
            await session.send("HeapProfiler.collectGarbage")
            heap += (await session.send("Runtime.getHeapUsage"))["usedSize"] / _MIB
            await session.detach()
        return {"core_mib": _resident_mib(self.cluster.process("core").pid), "page_mib": heap}


def _resident_mib(pid: int) -> float:
    """Linux."""
    status = Path(f"/proc/{pid}/status").read_text()
    (resident,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(resident.split()[1]) / 1024


def _call(func: str, text: str, output: str, inputs: list[str] | None = None) -> dict[str, Any]:
    names = inputs or []
    bound = [{"name": name, "var": name} for name in names]
    made = {"name": output, "is_output": True, "var": output, "sampling_config": SAMPLING}
    template = text + " ".join(f"{{{{{name}}}}}" for name in [*names, output])
    return {"template": template, "func_name": func, "parameters": [*bound, made], "reuse": False}


async def _wait(page: Page, condition: str, value: object) -> None:
    await page.wait_for_function(condition, arg=value, timeout=1e3 * _PATIENCE_S)


@asynccontextmanager
async def opened(cluster: Cluster, browser: Browser) -> AsyncIterator[Soak]:
    port = urlsplit(cluster.core_url).port
    assert port is not None
    assert cluster.cluster_token is not None
    breaks = Breaks(port)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(breaks.close)
        wire = await stack.enter_async_context(await asyncio.start_server(breaks.join, "127.0.0.1"))
        url = f"http://127.0.0.1:{wire.sockets[0].getsockname()[1]}"
        http = await stack.enter_async_context(HttpClient(cluster.core_url))
        tabs = []
        for _ in range(4):  # A browser context has at most six connections to a server.
            context = await browser.new_context()
            stack.push_async_callback(context.close)
            tabs.append(await context.new_page())
        soak = Soak(cluster, http, breaks, url, tabs)

        def heard(message: ConsoleMessage) -> None:
            if message.type == "error" and "Failed to load resource" not in message.text:
                soak.errors.append(message.text)

        for tab in soak.tabs:
            tab.on("console", heard)
            tab.on("pageerror", lambda error: soak.errors.append(str(error)))
            await tab.goto(f"{url}/ui/#key={page_key(cluster.cluster_token)}")
            await tab.wait_for_selector("header")
        await tabs[-1].goto(f"{url}/ui/#/engines")
        yield soak


async def soak(cluster: Cluster, browser: Browser, seconds: float) -> dict[str, Any]:
    """Runs rounds for `seconds`, and at least `_MIN_ROUNDS`. Returns their measurements. Raises if
    an update was lost."""
    samples: list[dict[str, float]] = []
    began = time.monotonic()
    async with opened(cluster, browser) as open_page:
        passed_s = 0.0
        while passed_s < seconds or open_page.num_rounds < _MIN_ROUNDS:
            await open_page.round()
            passed_s = time.monotonic() - began
            if passed_s >= len(samples) * seconds / _NUM_SAMPLES:
                samples.append(await open_page.memory())
    return {
        "seconds": time.monotonic() - began,
        "rounds": open_page.num_rounds,
        "connections_cut": open_page.num_cut,
        "longest_s": open_page.longest_s,
        "errors": open_page.errors,
        "samples": samples,
        "growth": {name: _growth([sample[name] for sample in samples]) for name in samples[0]},
    }


def _growth(values: list[float]) -> float | None:
    third = len(values) // 3
    if not third:
        return None
    return statistics.median(values[-third:]) / statistics.median(values[third : 2 * third])


async def run_soak(cluster: Cluster, minutes: float) -> dict[str, Any]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, _BROWSERS)), None),
            args=["--no-sandbox", "--disable-gpu"],
        )
        return await soak(cluster, browser, 60 * minutes)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    with Cluster(engines=[ENGINE] * 2) as cluster:
        report |= asyncio.run(run_soak(cluster, args.minutes))


if __name__ == "__main__":
    run_benchmark(__name__)
