"""The cost of many streams for the engine: the time of its steps if clients read whole outputs, if
a client streams from the engine directly, and if programs stream through ServeCore.

    python -m benchmark.serve.bench_streams
    python -m benchmark.serve.bench_streams --shape llama-3.1-8b        on a GPU

The three take turns. Engine, ServeCore and the client are separate processes, and a real engine has
a thread for steps and a thread for its server. With fewer than four cores they slow each other
down, and the figures mean little. A simulated engine sends chunks from the thread that runs its
steps, so every chunk makes the steps longer.

  step      milliseconds from one step to the next, as counted by the engine, while all streams run
  behind    seconds from the last step to the client's last text
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.bench_calls import connect, cpu_seconds
from benchmark.simulated import ENGINES, words
from parrot.cluster import Cluster
from parrot.protocol.engine_api import FillPiece, GenerateRequest
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import SamplingConfig

PROMPT = 64  # Letters.
SIMULATED = ENGINES / "sim_llama_3_1_8b.json"
LOAD_TIMEOUT_S = 240.0
_LOOK_S = 0.02
_FIRST_CONTEXT = 2**40


class Streams:
    """Streams of `num_streams` concurrent answers. `pid`: the process of ServeCore."""

    def __init__(self, cluster: Cluster, num_streams: int, num_tokens: int) -> None:
        url = cluster.url(cluster.engine_names[0])
        self.engine = EngineClient(HttpClient(url, bearer_token=cluster.cluster_token))
        self.pid = cluster.process("core").pid
        self._url = cluster.core_url
        self._model = cluster.configs[cluster.engine_names[0]]["model"]
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._draw = random.Random(1)
        self._next_context = _FIRST_CONTEXT

    async def unread(self) -> None:
        requests = [self._request() for _ in range(self._num_streams)]
        await asyncio.gather(*map(self.engine.generate, requests))
        await self.engine.free_contexts([request.context_id for request in requests])

    async def direct(self) -> None:
        async def read(request: GenerateRequest) -> None:
            async with aclosing(self.engine.generate_stream(request)) as events:
                async for _ in events:
                    pass

        requests = [self._request() for _ in range(self._num_streams)]
        await asyncio.gather(*map(read, requests))
        await self.engine.free_contexts([request.context_id for request in requests])

    async def front_door(self) -> None:
        async with connect() as http:

            async def read() -> None:
                body = {
                    "model": self._model,
                    "prompt": words(self._draw, PROMPT),
                    "max_tokens": self._num_tokens,
                    "ignore_eos": True,
                    "temperature": 0.0,
                    "stream": True,
                }
                url = f"{self._url}/v1/completions"
                async with http.post(url, data=orjson.dumps(body)) as reply:
                    assert reply.status == 200, await reply.text()
                    async for chunk in reply.content.iter_any():
                        assert b'"error"' not in chunk, chunk

            await asyncio.gather(*(read() for _ in range(self._num_streams)))

    async def measured(self, load: Callable[[], Awaitable[None]]) -> dict[str, float]:
        num_steps = (await self.engine.ping()).num_steps or 0
        spent, last_step = cpu_seconds(self.pid), time.perf_counter()
        full: list[tuple[float, int]] = []  # Times and step counts while all streams run.
        work = asyncio.ensure_future(load())
        while not work.done():
            await asyncio.wait((work,), timeout=_LOOK_S)
            info = await self.engine.ping()
            now = time.perf_counter()
            if (info.num_steps or 0) > num_steps:
                last_step, num_steps = now, info.num_steps or 0
                if info.num_running_jobs == self._num_streams:
                    full.append((now, num_steps))
        await work
        ended = time.perf_counter()
        if len(full) < 2:
            raise RuntimeError("the streams never ran all at once; use more --tokens")
        (began, first), (stopped, last) = full[0], full[-1]
        return {
            "step_ms": 1e3 * (stopped - began) / (last - first),
            "behind_s": max(0.0, ended - last_step),
            "core_cpu_us_per_token": 1e6
            * (cpu_seconds(self.pid) - spent)
            / (self._num_streams * self._num_tokens),
        }

    def _request(self) -> GenerateRequest:
        self._next_context += 1
        context = self._next_context
        ids = list(words(self._draw, PROMPT).encode())
        return GenerateRequest(
            context_id=context,
            fills=[FillPiece(context_id=context, token_ids=ids)],
            sampling_config=SamplingConfig(
                temperature=0.0, max_gen_length=self._num_tokens, ignore_tokenizer_eos=True
            ),
        )


async def compare(cluster: Cluster, args: argparse.Namespace, report: Report) -> None:
    streams = Streams(cluster, args.streams, args.tokens)
    loads = {
        "unread": streams.unread,
        "streamed directly": streams.direct,
        "streamed by ServeCore": streams.front_door,
    }
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
    for number in range(args.rounds + 1):  # The first round warms up.
        for name, load in loads.items():
            row = await streams.measured(load)
            if number:
                rows[name].append(row)
    for name, found in rows.items():
        pairs = zip(found, rows["unread"], strict=True)
        ratios = [row["step_ms"] / alone["step_ms"] for row, alone in pairs]
        middle = {key: statistics.median(row[key] for row in found) for key in found[0]}
        over = {"step_over_unread": statistics.median(ratios)}
        report.add("loads", {"load": name, "streams": args.streams} | middle | over)
    await streams.engine.close()


def engine_config(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if args.shape is None:
        config: dict[str, Any] = json.loads(args.engine.read_text())
        return config
    from benchmark.engine.bench_gpu import config_of
    from parrot.engine.models.shapes import KNOWN_SHAPES

    (folder / "config.json").write_text(json.dumps(KNOWN_SHAPES[args.shape]))
    return config_of(str(folder)).model_dump(mode="json", exclude={"engine_name", "port"})


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", type=Path, default=SIMULATED, help="an engine's config file")
    parser.add_argument("--shape", help="instead, run a model shape with random weights on a GPU")


def measure(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="streams_") as folder:
        engine = engine_config(args, Path(folder))
        report.uses("engine", engine)
        report["cpus"] = os.cpu_count()
        core = {"global_scheduler": {"max_queue_size": 100_000}}
        with Cluster(core=core, engines=[engine], ready_timeout_s=LOAD_TIMEOUT_S) as cluster:
            asyncio.run(compare(cluster, args, report))


if __name__ == "__main__":
    run_benchmark(__name__)
