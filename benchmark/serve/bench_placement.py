"""What placement by predicted seconds buys over what request routers do.

    python benchmark/serve/bench_placement.py gpts --rates 4 16 64
    python benchmark/serve/bench_placement.py fanout_cold
    python benchmark/serve/bench_placement.py mixed --chat-rate 1

Runs the real ServeCore over four `sim` engines on virtual time, whose costs were fitted to an H200
(sample_configs/engine/sim_*.json), under each value of `placement`. All have prefix caching, and
attention that reads shared KV once per step; "unshared" ones read it once per sequence, as the
engines behind request routers do.
"""

import argparse
import asyncio
import json
import math
import platform
import random
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from parrot.engine.config import SimConfig
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.public import SemanticCallRequest
from parrot.serve.config import GlobalSchedulerConfig
from parrot.simulation import PATIENT, SimClient, SimCluster, run_virtual

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmark" / "results"
GPTS = ROOT / "benchmark" / "apps" / "data" / "gpts.json"
LETTERS = "abcdefghijklmnopqrstuvwxyz      "
NUM_ENGINES = 4
UNSHARED = ", unshared"
PLACEMENTS = ("predicted", "prefix_aware", "round_robin")
CHAT_LENGTHS = (4, 1024)
Result = dict[str, Any]


@dataclass
class Site:
    """Where a case runs."""

    engine: SimConfig
    settings: dict[str, Any]
    models: tuple[str, ...] = ()  # an engine each; empty: four of the same
    slowdowns: dict[int, float] = field(default_factory=dict)

    def run(self, program: "Coroutine[Any, Any, None]", programs: "Programs") -> None:
        """To the end of `program`, on virtual time."""

        async def main() -> None:
            scheduler = GlobalSchedulerConfig.model_validate(
                {"max_queue_size": 100_000} | self.settings
            )
            core = PATIENT.model_copy(update={"global_scheduler": scheduler})
            async with SimCluster(0, engine=self.engine, core=core) as cluster:
                for i in range(NUM_ENGINES):
                    changes = {"model": self.models[i]} if self.models else {}
                    engine = await cluster.add_engine(**changes)
                    engine.slow_down(self.slowdowns.get(i, 1.0))
                programs.client = cluster.client()
                await program
                cluster.check_integrity()

        run_virtual(main())


class Programs:
    """The calls of many users, each in a session of its own. A letter is a token."""

    client: SimClient

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def words(self, size: int) -> str:
        return "".join(self.draw.choices(LETTERS, k=size))

    async def session(self) -> Result:
        return (await self.client.create_session()).model_dump()

    async def call(
        self,
        scope: Result,
        template: str,
        tokens: int,
        name: str,
        models: tuple[str, ...] = (),
        **inputs: str,
    ) -> str:
        """The id of its output variable. `inputs`: values, or ids of variables in `@...`."""
        sampling = {"max_gen_length": tokens, "ignore_tokenizer_eos": True, "temperature": 1.0}
        given = [
            {"name": key, "var_id": value[1:]}
            if value.startswith("@")
            else {"name": key, "value": value}
            for key, value in inputs.items()
        ]
        request = SemanticCallRequest.model_validate(
            scope
            | {
                "template": template + "{{out}}",
                "func_name": name,
                "models": list(models),
                "parameters": [
                    *given,
                    {"name": "out", "is_output": True, "sampling_config": sampling},
                ],
            }
        )
        return (await self.client.semantic_call(request)).param_info[-1].var_id

    async def read(self, scope: Result, var_id: str) -> None:
        await self.client.get_var(**scope, var_id=var_id, criteria=PerformanceCriteria.LATENCY)


# gpts


class Gpts(Programs):
    """Requests of four applications with long system prompts, as a Poisson stream of `rate`."""

    def __init__(self, rate: float, seconds: float, warm_up_s: float, seed: int) -> None:
        super().__init__(seed)
        self.rate, self.seconds, self.warm_up_s = rate, seconds, warm_up_s
        self.s_per_token: list[float] = []
        self.seconds_each: list[float] = []
        apps = json.loads(GPTS.read_text())
        self._apps = [(app, self.words(app["prompt_length"])) for app in apps]
        self._shares = [app["percentage"] for app in apps]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            time = self.draw.expovariate(self.rate)
            while time < self.seconds:
                app, prompt = self.draw.choices(self._apps, self._shares)[0]
                query = self.words(app["query_length"])
                group.create_task(self._request(time, app, prompt, query))
                time += self.draw.expovariate(self.rate)

    async def _request(self, start: float, app: Result, prompt: str, query: str) -> None:
        await asyncio.sleep(start)
        loop = asyncio.get_running_loop()
        began = loop.time()
        scope = await self.session()
        tokens, name = app["output_length"], app["app_name"]
        out = await self.call(scope, prompt + "{{query}}", tokens, name, query=query)
        await self.read(scope, out)
        if start >= self.warm_up_s:
            self.seconds_each.append(loop.time() - began)
            self.s_per_token.append(self.seconds_each[-1] / tokens)
        await self.client.delete_session(scope["session_id"], scope["session_auth"])


def gpts(args: argparse.Namespace, engine: SimConfig) -> Result:
    flat = engine.instance.model_copy(update={"shared_prefix": False})
    unshared = engine.model_copy(update={"instance": flat})
    curves: dict[str, list[tuple[float, float]]] = {}
    rows = []
    for name in (*PLACEMENTS, *(f"{placement}{UNSHARED}" for placement in PLACEMENTS[1:])):
        site = Site(
            unshared if name.endswith(UNSHARED) else engine,
            {"placement": name.removesuffix(UNSHARED)},
        )
        for rate in args.rates:
            programs = Gpts(rate, args.seconds, args.seconds / 4, args.seed)
            site.run(programs.run(), programs)
            ms = fmean(programs.s_per_token) * 1e3
            curves.setdefault(name, []).append((rate, ms))
            rows.append(
                {
                    "placement": name,
                    "rate": rate,
                    "ms_per_token": round(ms, 3),
                    "mean_s": round(fmean(programs.seconds_each), 3),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
            if ms > args.give_up_ms:
                break
    return {"runs": rows, "rate_at_equal_ms_per_token": sustained(curves, args.levels)}


def sustained(
    curves: dict[str, list[tuple[float, float]]], levels: list[float]
) -> list[dict[str, float | None]]:
    """The request rate at which each curve crosses so many ms per token, and the ratios."""
    rows = []
    for level in levels:
        rates = {name: crossing(curve, level) for name, curve in curves.items()}
        row: dict[str, float | None] = {"ms_per_token": level, **rates}
        for other in [name for name in rates if name != "predicted"]:
            ours, theirs = rates["predicted"], rates[other]
            row[f"over_{other}"] = round(ours / theirs, 2) if ours and theirs else None
        rows.append(row)
    return rows


def crossing(curve: list[tuple[float, float]], level: float) -> float | None:
    for (rate0, ms0), (rate1, ms1) in pairwise(curve):
        if ms0 <= level < ms1:
            return round(rate0 + (level - ms0) / (ms1 - ms0) * (rate1 - rate0), 2)
    return None


# fanout_cold


class Fanout(Programs):
    """Siblings with a long prefix that nobody has computed; all at once, or for one `join`."""

    def __init__(self, args: argparse.Namespace, parts: tuple[int, ...] = ()) -> None:
        super().__init__(args.seed)
        self.args, self.makespan = args, 0.0
        self._models = [(f"model{i}",) for i, size in enumerate(parts) for _ in range(size)] or [
            ()
        ] * args.siblings

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        scope, prefix = await self.session(), self.words(self.args.prefix)
        outputs = await asyncio.gather(
            *(
                self.call(
                    scope,
                    "{{prefix}}{{query}}",
                    self.args.output,
                    "sibling",
                    models,
                    prefix=prefix,
                    query=self.words(self.args.query),
                )
                for models in self._models
            )
        )
        began = loop.time()
        if self.args.join:
            names = [f"x{i}" for i in range(len(outputs))]
            template = "".join(f"{{{{{name}}}}}" for name in names)
            inputs = {name: f"@{out}" for name, out in zip(names, outputs, strict=True)}
            outputs = [await self.call(scope, template, 1, "join", self._models[0], **inputs)]
        await asyncio.gather(*(self.read(scope, out) for out in outputs))
        self.makespan = loop.time() - began


def partitions(total: int, parts: int, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as up to `parts` sizes, largest first."""
    if parts == 1:
        if total <= most:
            yield (total,)
        return
    for size in range(min(total, most), math.ceil(total / parts) - 1, -1):
        if size == total:
            yield (total,)
        else:
            yield from ((size, *rest) for rest in partitions(total - size, parts - 1, size))


def fanout_cold(args: argparse.Namespace, engine: SimConfig) -> Result:
    models = tuple(f"model{i}" for i in range(NUM_ENGINES))
    spans: dict[tuple[int, ...], float] = {}
    args.join = False
    for parts in partitions(args.siblings, NUM_ENGINES, args.siblings):
        programs = Fanout(args, parts)
        Site(engine, {}, models).run(programs.run(), programs)
        spans[parts] = programs.makespan
    best = min(spans, key=spans.__getitem__)
    args.join = True
    joined = Fanout(args, best)
    Site(engine, {}, models).run(joined.run(), joined)
    result: Result = {
        "splits_tried": len(spans),
        "best_split": best,
        "best_s": round(spans[best], 4),
        "best_s_with_join": round(joined.makespan, 4),
        "one_engine_s": round(spans[(args.siblings,)], 4),
    }
    for reads in ("each", "join"):
        args.join = reads == "join"
        least_s = joined.makespan if args.join else spans[best]
        for placement in PLACEMENTS:
            programs = Fanout(args)
            Site(engine, {"placement": placement}).run(programs.run(), programs)
            result[f"{placement} read={reads}"] = {
                "makespan_s": round(programs.makespan, 4),
                "over_best": round(programs.makespan / least_s, 3),
            }
    return result


# mixed


class Mixed(Programs):
    """Chats that arrive one by one, and map-reduce applications that are there from the start;
    with `again`, each of those begins anew when it ends, for as long as chats arrive."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.seed)
        self.args = args
        self.tpot_s: list[float] = []
        self.ttft_s: list[float] = []
        self.jct_s: list[float] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            time = 0.0
            for _ in range(self.args.chats):
                time += self.draw.expovariate(self.args.chat_rate)
                prompt, output = self._length(161, 1.1), self._length(338, 0.8)
                group.create_task(self._chat(time, self.words(prompt), output))
            for _ in range(self.args.apps):
                group.create_task(self._map_reduces(time if self.args.again else 0.0))

    async def _map_reduces(self, until: float) -> None:
        await self._map_reduce()
        while asyncio.get_running_loop().time() < until:
            await self._map_reduce()

    def _length(self, mean: float, spread: float) -> int:
        drawn = self.draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)
        return round(min(max(drawn, CHAT_LENGTHS[0]), CHAT_LENGTHS[1]))

    async def _chat(self, start: float, prompt: str, tokens: int) -> None:
        await asyncio.sleep(start)
        scope, loop = await self.session(), asyncio.get_running_loop()
        began = loop.time()
        out = await self.call(scope, "{{prompt}}", tokens, "chat", prompt=prompt)
        times = [loop.time() async for _ in self.client.stream_var(**scope, var_id=out)]
        self.ttft_s.append(times[0] - began)
        if tokens > 1:
            self.tpot_s.append((times[-1] - times[0]) / (tokens - 1))

    async def _map_reduce(self) -> None:
        args, loop = self.args, asyncio.get_running_loop()
        scope, began = await self.session(), loop.time()
        instruction = "Summarize this part of the document in a few sentences, please. "
        chunks = [self.words(args.chunk) for _ in range(args.document // args.chunk)]
        parts = [
            await self.call(scope, instruction + "{{chunk}}", args.output, "map", chunk=chunk)
            for chunk in chunks
        ]
        names = [f"x{i}" for i in range(len(parts))]
        template = "Join: " + "".join(f"{{{{{name}}}}}" for name in names)
        inputs = {name: f"@{part}" for name, part in zip(names, parts, strict=True)}
        await self.read(scope, await self.call(scope, template, args.output, "reduce", **inputs))
        self.jct_s.append(loop.time() - began)


def mixed(args: argparse.Namespace, engine: SimConfig) -> Result:
    result: Result = {}
    for placement in PLACEMENTS:
        programs = Mixed(args)
        Site(engine, {"placement": placement}).run(programs.run(), programs)
        result[placement] = {
            "chat_tpot_ms": summary(programs.tpot_s),
            "chat_ttft_ms": summary(programs.ttft_s),
            "map_reduce_jct_ms": summary(programs.jct_s),
        }
    ours = result["predicted"]
    for other in PLACEMENTS[1:]:
        theirs = result[other]
        result[f"over_{other}"] = {
            "chat_p99_tpot": round(theirs["chat_tpot_ms"]["p99"] / ours["chat_tpot_ms"]["p99"], 2),
            "map_reduce_mean_jct": round(
                theirs["map_reduce_jct_ms"]["mean"] / ours["map_reduce_jct_ms"]["mean"], 2
            ),
        }
    return result


def summary(seconds: list[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {
        "mean": round(fmean(seconds) * 1e3, 2),
        "p50": round(cuts[49] * 1e3, 2),
        "p99": round(cuts[98] * 1e3, 2),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", default="llama_2_7b", help="sample_configs/engine/sim_*.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write benchmark/results/")
    cases = parser.add_subparsers(dest="case", required=True)
    case = cases.add_parser("gpts")
    case.add_argument("--rates", type=float, nargs="+", default=[0.25, 1, 4, 8, 16, 32, 48, 64])
    case.add_argument("--levels", type=float, nargs="+", default=[6, 8, 10, 12], help="ms/token")
    case.add_argument("--seconds", type=float, default=40.0, help="of arrivals; 1/4 are warm-up")
    case.add_argument("--give-up-ms", type=float, default=20.0)
    case = cases.add_parser("fanout_cold")
    case.add_argument("--siblings", type=int, default=32)
    case.add_argument("--prefix", type=int, default=8192)
    case.add_argument("--query", type=int, default=50)
    case.add_argument("--output", type=int, default=100)
    case = cases.add_parser("mixed")
    case.add_argument("--chats", type=int, default=40)
    case.add_argument("--chat-rate", type=float, default=1.0)
    case.add_argument("--again", action="store_true", help="applications without an end")
    case.add_argument("--apps", type=int, default=9)
    case.add_argument("--document", type=int, default=20_000)
    case.add_argument("--chunk", type=int, default=1024)
    case.add_argument("--output", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    args = parse()
    path = ROOT / "sample_configs" / "engine" / f"sim_{args.engine}.json"
    engine = SimConfig.model_validate_json(path.read_text())
    case = {"gpts": gpts, "fanout_cold": fanout_cold, "mixed": mixed}[args.case]
    result = {
        "command": "python benchmark/serve/bench_placement.py " + " ".join(sys.argv[1:]),
        "python": platform.python_version(),
        "engine": engine.instance.model_dump(),
        "num_engines": NUM_ENGINES,
        **case(args, engine),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.save:
        case_name = f"{args.case}_again" if getattr(args, "again", False) else args.case
        (RESULTS / f"placement_{case_name}_{args.engine}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
