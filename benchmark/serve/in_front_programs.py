"""Programs of Parrot's front end in front of a server, and programs of plain clients on the server.

    parrot up http://127.0.0.1:8000/v1
    python -m benchmark.serve.in_front_programs

Five clients run the applications of `in_front_of_server.py` in turns, with different texts:

  pfunc        `from parrot import P`: a semantic function for each step; each call is one request
  pfunc_batch  the same, but the calls before a read are one request (`vm.batch()`)
  graph        the client of `parrot bench` for Parrot: one graph, by REST
  plain        the client of `parrot bench` for the server: one request after the other
  openai       the package `openai`: `AsyncOpenAI`, one request after the other

`open_ms` is the time in which `P.VirtualMachine` opens the session of a program, as `vm.run` does
before it calls the program. E2E and TTFT do not contain it. `graph` opens its session with its
graph. `over_openai` is the median E2E over that of `openai`. `reused` counts the calls that took
the result of an identical call. Times of rows in which it is not 0 cannot be compared."""

import argparse
import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openai import AsyncOpenAI

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.in_front_of_server import CASES
from parrot import P
from parrot.cli.bench.figures import MeasuredSide, figures
from parrot.cli.bench.plan import JobRunner
from parrot.cli.bench.program import (
    Backend,
    CallUsage,
    Program,
    ProgramCall,
    ProgramOutput,
    StreamTimes,
)
from parrot.cli.bench.sessions import sampling_of, usages_of
from parrot.cli.bench.sides import VARIABLES, Address, CannotMeasure, Connections, Side
from parrot.cli.bench.text import PromptText
from parrot.cli.bench.waiting import WaitingProgram
from parrot.cli.bench.workloads import TimedWorkload, parse_load
from parrot.frontend.pfunc.function import SemanticFunction
from parrot.protocol.template import placeholder

APPLICATIONS = [case for case, options in CASES.items() if "--workload" in options]
_CONCURRENCY = 8  # Of cases without the option, as in `parrot bench`.
_TIMEOUT_S = 600.0  # Of an application.
_FIGURES = ("p50_ttft_ms", "p50_e2el_ms", "p90_e2el_ms")


class PFuncProgram(Program):
    """A program of the front end, in its form for async code. It submits its calls one after the
    other, in the order of the program, and reads outputs as streams where the workload does."""

    def __init__(self, client: "PFuncClient", app: str) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._client = client
        self._vm = P.VirtualMachine(client.url, app=app)
        self._new: list[ProgramCall] = []
        self._vars: dict[ProgramOutput, P.SemanticVariable] = {}

    async def prepare(self) -> None:
        began = self.now()
        await asyncio.to_thread(self._vm.register_session)
        self._client.open_s.append(self.now() - began)

    async def read(self, *outputs: ProgramOutput) -> None:
        with self._vm.running_scope():
            if self._client.is_batch:
                async with self._vm.batch():
                    await self._submit()
            else:
                await self._submit()
        await asyncio.gather(*map(self._read, outputs))

    async def end(self) -> None:
        if self._vm.session_registered:
            info = await asyncio.to_thread(self._vm.session_info)
            self.account.usages += usages_of(info)
            await asyncio.to_thread(self._vm.unregister_session)

    async def set(self, output: ProgramOutput, text: PromptText) -> None:
        raise NotImplementedError("these applications have no inputs that arrive later")

    async def read_first(self, outputs: Sequence[ProgramOutput], count: int) -> list[ProgramOutput]:
        raise NotImplementedError("these applications read all their outputs")

    def _add(self, call: ProgramCall) -> None:
        self._new.append(call)

    def _add_input(self, output: ProgramOutput) -> None:
        raise NotImplementedError("these applications have no inputs that arrive later")

    async def _submit(self) -> None:
        calls, self._new = self._new, []
        for call in calls:
            given = [
                self._vars[piece] if isinstance(piece, ProgramOutput) else piece.content
                for piece in call.prompt
                if isinstance(piece, ProgramOutput) or piece.is_data
            ]
            self._vars[call.output] = await self._client.function(call).ainvoke(*given)

    async def _read(self, output: ProgramOutput) -> None:
        variable = self._vars[output]
        if output.call is None or not output.call.streamed:
            await variable
            return
        arrivals = [self.now() async for _ in variable.astream()]
        self.account.streams[output] = StreamTimes(tuple(arrivals) or (self.now(),))


class PFuncClient:
    """Makes the programs of the front end. Like the module of a program, it has the semantic
    functions. `open_s`: the seconds in which each session was opened."""

    def __init__(self, url: str, model: str, *, is_batch: bool) -> None:
        self.url = url
        self.is_batch = is_batch
        self.open_s: list[float] = []
        self._vm = P.VirtualMachine(url)
        self._model = model
        self._functions: dict[tuple[str, str, int], SemanticFunction] = {}

    def program(self, app: str) -> PFuncProgram:
        return PFuncProgram(self, app)

    def function(self, call: ProgramCall) -> SemanticFunction:
        """The function of the call. Constants form its template, other parts are its inputs."""
        template, params = "", []
        for number, piece in enumerate(call.prompt):
            if isinstance(piece, PromptText) and not piece.is_data:
                template += piece.content
            else:
                params.append(P.Parameter(f"i{number}", P.ParamType.INPUT_LOC))
                template += placeholder(params[-1].name)
        shape = call.function, template, call.output.tokens
        if shape not in self._functions:
            sampling = P.SamplingConfig(max_gen_length=call.output.tokens, **sampling_of(call))
            params.append(P.Parameter("out", P.ParamType.OUTPUT_LOC, sampling))
            self._functions[shape] = self._vm.define_function(
                call.function, template + placeholder("out"), params, models=[self._model]
            )
        return self._functions[shape]


class PackageProgram(WaitingProgram):
    """A program of the package `openai`. Its calls are greedy and have no stop strings."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        super().__init__()
        self._client = client
        self._model = model

    async def _complete(self, call: ProgramCall, texts: Sequence[str]) -> str:
        assert call.seed is None, call
        assert call.stop is None, call
        asked: dict[str, Any] = {
            "model": self._model,
            "prompt": "".join(texts),
            "max_tokens": call.output.tokens,
            "temperature": 0.0,
            "extra_body": {"ignore_eos": True},
        }
        if call.streamed:
            return await self._stream(call, asked)
        answer = await self._client.completions.create(**asked)
        self._account_for(answer.usage)
        return str(answer.choices[0].text)

    async def _stream(self, call: ProgramCall, asked: dict[str, Any]) -> str:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        pieces: list[str] = []
        arrivals: list[float] = []
        usage = None
        async with await self._client.completions.create(**asked) as events:
            async for event in events:
                usage = event.usage or usage
                if event.choices and event.choices[0].text:
                    pieces.append(event.choices[0].text)
                    arrivals.append(self.now())
        tokens = None if usage is None else usage.completion_tokens
        self.account.streams[call.output] = StreamTimes(tuple(arrivals) or (self.now(),), tokens)
        self._account_for(usage)
        return "".join(pieces)

    def _account_for(self, usage: Any) -> None:
        if usage is not None:
            details = usage.prompt_tokens_details
            cached = None if details is None else details.cached_tokens
            self.account.usages.append(
                CallUsage(usage.prompt_tokens, usage.completion_tokens, cached)
            )


@dataclass(slots=True)
class Client:
    """A client and its results. `opened`: it opens a session before the completion time."""

    measured: MeasuredSide
    opened: PFuncClient | None = None


def clients(graph: Side, plain: Side, package: AsyncOpenAI) -> Iterator[Client]:
    """All clients of the sides of `parrot bench`, each with texts that no other has."""

    def client(
        place: int,
        side: Side,
        style: str,
        program: Callable[[str], Program],
        opened: PFuncClient | None = None,
    ) -> Client:
        backend = Backend(program, side.backend.close)
        text = graph.text.of_side(place)
        return Client(MeasuredSide(replace(side, style=style, backend=backend, text=text)), opened)

    for place, is_batch in enumerate((False, True)):
        pfunc = PFuncClient(graph.url, graph.model, is_batch=is_batch)
        yield client(place, graph, "pfunc" + "_batch" * is_batch, pfunc.program, pfunc)
    yield client(2, graph, "graph", graph.backend.program)
    yield client(3, plain, "plain", plain.backend.program)
    yield client(4, plain, "openai", lambda app: PackageProgram(package, plain.model))


class Measurement:
    """Runs the clients in turns."""

    def __init__(self, graph: Side, plain: Side, package: AsyncOpenAI) -> None:
        self._sides = graph, plain, package
        self._seed = random.SystemRandom().randrange(2**32)

    async def run(self, case: str, load: TimedWorkload, repeat: int) -> list[dict[str, Any]]:
        """The rows of a case."""
        found = list(clients(*self._sides))
        for turn in range(repeat):
            start = turn % len(found)  # No client is always the first.
            for client in found[start:] + found[:start]:
                await self._run_client(client, load, (self._seed, case, turn))
        rows = [_row(case, client) for client in found]
        openai = rows[-1]["p50_e2el_ms"]
        for row in rows:
            row["over_openai"] = round(row["p50_e2el_ms"] / openai, 4)
        return rows

    async def _run_client(self, client: Client, load: TimedWorkload, salt: object) -> None:
        side, loop = client.measured.side, asyncio.get_running_loop()
        plan = load.plan(side.text.salted(salt), self._seed)
        if client.opened is not None:
            jobs = [replace(job, run=partial(_prepared, job.run)) for job in plan.jobs]
            plan = replace(plan, jobs=jobs)
        runner = JobRunner(side.backend, timeout_s=_TIMEOUT_S)
        began = loop.time()
        await runner.run(plan)
        client.measured.seconds += loop.time() - began
        client.measured.num_planned += len(plan.jobs)
        client.measured.results += runner.results


async def _prepared(run: Callable[[Program], Awaitable[None]], program: Program) -> None:
    await program.prepare()
    program.begin_now()
    await run(program)


def _row(case: str, client: Client) -> dict[str, Any]:
    """Raises `CannotMeasure` if no application was completed."""
    found = figures(client.measured)
    if not found["completed"]:
        raise CannotMeasure(f"{case}, {found['style']}: {found['errors']}")
    row = {"case": case, "client": found["style"]}
    row |= {name: found[name] for name in ("completed", "failed", "errors")}
    row |= {name: round(found[name], 2) for name in _FIGURES}
    if client.opened is not None:
        row["open_ms"] = round(1e3 * statistics.median(client.opened.open_s), 2)
    row["prompt_tokens"] = found["total_input_tokens"]
    row["cached_tokens"] = found["total_cached_tokens"]
    usages = [usage for result in client.measured.results for usage in result.account.usages]
    return row | {"reused": sum(usage.is_reused for usage in usages)}


def _load(options: str) -> tuple[TimedWorkload, int]:
    """The workload of the options of `parrot bench`, and its number of repetitions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--num-requests", type=int)
    parser.add_argument("--concurrency", type=int, default=_CONCURRENCY)
    parser.add_argument("--repeat", type=int, required=True)
    args = parser.parse_args(options.split())
    lengths = {"num_requests": args.num_requests}
    return parse_load(args.workload, lengths, args.concurrency, None), args.repeat


async def _measure(args: argparse.Namespace, report: Report, cases: dict[str, str]) -> None:
    async with AsyncExitStack() as stack:
        connections = Connections(stack, is_chat=False, timeout_s=_TIMEOUT_S)
        first, second = (Address(url, None, None, "", "") for url in (args.parrot, args.server))
        graph, plain = await connections.sides(first, [second], is_application=True)
        if graph.style != VARIABLES:
            raise CannotMeasure(f"{args.parrot} is no ServeCore")
        url = args.server.rstrip("/").removesuffix("/v1") + "/v1"
        package = await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key="none"))
        measurement = Measurement(graph, plain, package)
        await measurement.run("warm-up", _load("--workload map_reduce --repeat 1")[0], 1)
        for case, options in cases.items():
            for row in await measurement.run(case, *_load(options)):
                report.add("cases", row)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parrot", default="http://127.0.0.1:9000")
    parser.add_argument("--server", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--only", choices=APPLICATIONS, nargs="*", default=APPLICATIONS)
    parser.add_argument("--num-requests", type=int, help="applications of each case and client")
    parser.add_argument("--repeat", type=int, help="turns of each case")


def measure(args: argparse.Namespace, report: Report) -> None:
    given = {"--num-requests": args.num_requests, "--repeat": args.repeat}
    more = "".join(f" {name} {value}" for name, value in given.items() if value is not None)
    cases = {case: CASES[case] + more for case in args.only}
    report.uses("cases", cases)
    asyncio.run(_measure(args, report, cases))


if __name__ == "__main__":
    run_benchmark(__name__)
