"""The cost of Parrot in front of a server with OpenAI's API, without the cost of a model.

    python -m benchmark.serve.bench_in_front

The server answers immediately (`instant_server.py`). Streamed requests of 4,000 letters go through
ServeCore, through a proxy that parses nothing (`plain_proxy.py`, the floor), and to the server
directly, in turns. `--idle-s` is the time between two requests, in which caches become cold:

  ttft_ms       milliseconds to the first token, median, and what ServeCore and the proxy add
  long_ttft_ms  the same for prompts of 400,000 letters, about 100,000 tokens
  cpu_ms        milliseconds of ServeCore's CPU per request with 1 token, and per further token;
                `chunks` are 1,000 tokens of `--streams` streams at a time
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.bench_calls import connect, cpu_seconds
from benchmark.serve.instant_server import MODEL
from benchmark.simulated import words
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port

PROMPT_LETTERS, LONG_LETTERS = 4000, 400_000
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@contextmanager
def server(module: str, *arguments: str) -> Iterator[str]:
    """The URL of a running server of this package."""
    port = free_port("127.0.0.1", set())
    command = [sys.executable, "-m", f"benchmark.serve.{module}", str(port), *arguments]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def until_ready(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                async with http.get(f"{url}/v1/models") as response:
                    if (await response.json())["data"]:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)  # Poll: there is no notification when the server has a model.


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    api: str,
    num_tokens: int,
    letters: int = PROMPT_LETTERS,
) -> float:
    """Seconds to the first token of one streamed request with a new prompt."""
    text = words(random.Random(), letters)
    prompt = (
        {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
    )
    body = {"model": MODEL, "max_tokens": num_tokens, "stream": True, **prompt}
    began, first = time.perf_counter(), None
    async with http.post(url + PATHS[api], json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if first is None and b"word" in line:
                first = time.perf_counter() - began
    assert first is not None, "an answer without a token"
    return first


async def ttft(
    http: aiohttp.ClientSession,
    api: str,
    urls: dict[str, str],
    num: int,
    idle_s: float,
    letters: int = PROMPT_LETTERS,
) -> dict[str, float]:
    """Milliseconds to the first token. `urls`: "parrot", "proxy" and "direct". The requests have 2
    tokens, so that the end of an answer does not arrive with its first token."""
    times: dict[str, list[float]] = {way: [] for way in urls}
    for _ in range(num):
        for way, url in urls.items():
            await asyncio.sleep(idle_s)
            times[way].append(await ask(http, url, api, 2, letters))
    found = {way: round(1e3 * statistics.median(values), 3) for way, values in times.items()}
    for way in ("parrot", "proxy"):
        added = [a - b for a, b in zip(times[way], times["direct"], strict=True)]
        found[f"{way}_adds"] = round(1e3 * statistics.median(added), 3)
    return found


async def cpu(
    http: aiohttp.ClientSession,
    api: str,
    core: str,
    pid: int,
    num: int,
    num_tokens: int,
    at_a_time: int = 32,
) -> float:
    """ServeCore's CPU milliseconds per request."""
    before, rounds = cpu_seconds(pid), max(1, num // at_a_time)
    for _ in range(rounds):
        await asyncio.gather(*(ask(http, core, api, num_tokens) for _ in range(at_a_time)))
    return 1e3 * (cpu_seconds(pid) - before) / (rounds * at_a_time)


async def measure_api(
    api: str, urls: dict[str, str], pid: int, args: argparse.Namespace
) -> dict[str, Any]:
    num, core = args.requests, urls["parrot"]
    async with connect() as http:
        await until_ready(http, core)
        await until_ready(http, urls["proxy"])
        await ttft(http, api, urls, 20, 0)
        found = await ttft(http, api, urls, num, args.idle_s)
        long = await ttft(http, api, urls, max(5, num // 10), args.idle_s, LONG_LETTERS)
        one = await cpu(http, api, core, pid, num, 1)
        many = await cpu(http, api, core, pid, num, 65)
        few_of_all = await cpu(http, api, core, pid, num, 1, args.streams)
        many_of_all = await cpu(http, api, core, pid, num, 65, args.streams)
    figures = {
        "request": round(one, 3),
        "token": round((many - one) / 64, 4),
        "chunks": round(1e3 * (many_of_all - few_of_all) / 64, 2),
    }
    return {"ttft_ms": found, "long_ttft_ms": long, "cpu_ms": figures}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200, help="per figure")
    parser.add_argument("--idle-s", type=float, default=0.0, help="pause before each request")
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams, for `chunks`")


def measure(args: argparse.Namespace, report: Report) -> None:
    with server("instant_server") as direct, server("plain_proxy", direct) as proxy:
        core = {"host": "127.0.0.1", "servers": [{"url": f"{direct}/v1"}]}
        with Cluster(core, []) as cluster:
            urls = {"parrot": cluster.core_url, "proxy": proxy, "direct": direct}
            for api in PATHS:
                found = measure_api(api, urls, cluster.process("core").pid, args)
                report.add("apis", {"api": api, **asyncio.run(found)})


if __name__ == "__main__":
    run_benchmark(__name__)
