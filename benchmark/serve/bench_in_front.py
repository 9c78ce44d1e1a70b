"""The cost of Parrot in front of a server with OpenAI's API, without the cost of a model.

    python -m benchmark.serve.bench_in_front

The server answers at once (`instant_server.py`). Streamed requests of 4,000 letters go through
ServeCore and to the server directly, in turns:

  ttft_ms  milliseconds to the first token, median, and the difference of the two ways
  cpu_ms   milliseconds of ServeCore's CPU per request with 1 token, and per further token
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

PROMPT_LETTERS = 4000
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@contextmanager
def instant_server() -> Iterator[str]:
    """The URL of a running server."""
    port = free_port("127.0.0.1", set())
    command = [sys.executable, "-m", "benchmark.serve.instant_server", str(port)]
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
            await asyncio.sleep(0.05)  # Nothing else reports when the server has a model.


async def ask(http: aiohttp.ClientSession, url: str, api: str, num_tokens: int) -> float:
    """Seconds to the first token of one streamed request with a new prompt."""
    text = words(random.Random(), PROMPT_LETTERS)
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


async def ttft(http: aiohttp.ClientSession, api: str, core: str, server: str, num: int) -> Any:
    through, direct = [], []
    for _ in range(num):
        through.append(await ask(http, core, api, 1))
        direct.append(await ask(http, server, api, 1))
    added = [a - b for a, b in zip(through, direct, strict=True)]
    return {
        name: round(1e3 * statistics.median(values), 3)
        for name, values in (("through", through), ("direct", direct), ("added", added))
    }


async def cpu(
    http: aiohttp.ClientSession, api: str, core: str, pid: int, num: int, num_tokens: int
) -> float:
    """ServeCore's CPU milliseconds per request, 32 requests at a time."""
    before = cpu_seconds(pid)
    for _ in range(num // 32):
        await asyncio.gather(*(ask(http, core, api, num_tokens) for _ in range(32)))
    return 1e3 * (cpu_seconds(pid) - before) / (num // 32 * 32)


async def measure_api(api: str, core: str, server: str, pid: int, num: int) -> dict[str, Any]:
    async with connect() as http:
        await until_ready(http, core)
        await ttft(http, api, core, server, 20)
        found = await ttft(http, api, core, server, num)
        one = await cpu(http, api, core, pid, num, 1)
        many = await cpu(http, api, core, pid, num, 65)
    per_token = (many - one) / 64
    return {"ttft_ms": found, "cpu_ms": {"request": round(one, 3), "token": round(per_token, 4)}}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200, help="per figure")


def measure(args: argparse.Namespace, report: Report) -> None:
    with instant_server() as server:
        core = {"host": "127.0.0.1", "servers": [{"url": f"{server}/v1"}]}
        with Cluster(core, []) as cluster:
            pid = cluster.process("core").pid
            for api in PATHS:
                found = measure_api(api, cluster.core_url, server, pid, args.requests)
                report.add("apis", {"api": api, **asyncio.run(found)})


if __name__ == "__main__":
    run_benchmark(__name__)
