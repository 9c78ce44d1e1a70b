"""Server processes that start within 0.05 s, because they are forked from a process that has
imported everything. Their wall clock can be set, and they report their internal state."""

import asyncio
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from parrot.engine import http_server as engine_server
from parrot.engine.runner.ranks import follower
from parrot.protocol.endpoint import Access, RuledRoute
from parrot.protocol.engine_api import GenerateRequest, GenerateResponse
from parrot.serve.core import ServeCore
from parrot.server import http_server as core_server
from parrot.server import serving

ACCOUNT = "/nemesis/account"
_FOLLOWER = follower.__name__.encode()
_NUMBER = struct.Struct("d")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class WallClock:
    """The error of the wall clock of all servers, in a memory-mapped file that they share."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_NUMBER.pack(0.0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBER.size)
        self.path = path

    def step(self, seconds: float) -> None:
        _NUMBER.pack_into(self._memory, 0, self.offset_s + seconds)

    @property
    def offset_s(self) -> float:
        (offset,) = _NUMBER.unpack_from(self._memory, 0)
        return float(offset)

    def install(self) -> None:
        """Apply the error to the time of this process."""
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + self.offset_s
        time.time_ns = lambda: now_ns() + int(1e9 * self.offset_s)


class AnswerLog:
    """A file with a line for each call that an engine answered. Aborted calls, and calls that were
    running when the process died, have no line."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def install(self, service: Any) -> None:
        """Log the calls of this engine from now on."""
        generate, generate_stream = service.generate, service.generate_stream

        async def logged(request: GenerateRequest, *args: Any) -> Any:
            began = time.monotonic()
            response = await generate(request, *args)
            self._write(request, began)
            return response

        async def logged_stream(request: GenerateRequest) -> AsyncGenerator[Any]:
            began = time.monotonic()
            async with aclosing(generate_stream(request)) as events:
                async for event in events:
                    if isinstance(event, GenerateResponse):
                        self._write(request, began)
                    yield event

        service.generate, service.generate_stream = logged, logged_stream

    def _write(self, request: GenerateRequest, began: float) -> None:
        line = {"process": os.getpid(), "tenant": request.tenant, "began": began}
        line["ended"] = time.monotonic()
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Server:
    """A server that can be killed and started again. Its process calls `run` with the path of its
    config and with `facts`."""

    def __init__(
        self,
        name: str,
        run: Callable[..., None],
        config: Mapping[str, Any],
        folder: Path,
        *facts: Any,
    ) -> None:
        self.name = name
        self.config = dict(config)
        self.log = folder / f"{name}.log"
        self.folder = folder
        self._run = run
        self._facts = facts
        self._process: multiprocessing.process.BaseProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, self.name
        assert self._process.pid is not None, self.name
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        assert not self.is_alive, self.name
        path = self.folder / f"{self.name}.json"
        path.write_text(json.dumps(self.config))
        self._process = _CONTEXT.Process(
            target=_be, args=(self._run, str(path), str(self.log), *self._facts), daemon=True
        )
        self._process.start()

    @property
    def ranks(self) -> list[int]:
        """The ids of the other processes of an engine with tensor parallelism."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/children")
        try:
            found = [Path(f"/proc/{pid}") for task in tasks for pid in task.read_text().split()]
            return [int(p.name) for p in found if _FOLLOWER in (p / "cmdline").read_bytes()]
        except FileNotFoundError:  # a rank has just ended, so the others are ending
            return []

    def signal(self, signum: signal.Signals) -> None:
        if self.is_alive:
            os.kill(self.pid, signum)

    async def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> None:
        """Send SIGTERM, and wait until the process has ended. Kills it after 20 s."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.ended(), 20.0)
        except TimeoutError:
            await self.kill()

    async def ended(self) -> None:
        process = self._process
        if process is None or not process.is_alive():
            return
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(process.sentinel, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(process.sentinel)
        process.join()

    def fill_disk(self, room: int) -> None:
        """Limit the size of the process's files to that of the journal plus `room` bytes."""
        journal = Path(self.config["journal"])
        files = [
            path for path in journal.parent.glob(f"{journal.name}*") if path.suffix != ".reserve"
        ]
        sizes = [path.stat().st_size for path in files]
        limit = max(sizes, default=0) + room
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def make_room(self) -> None:
        if self.is_alive:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, unlimited)


def _be(run: Callable[..., None], config: str, log: str, *facts: Any) -> None:
    """The main function of a server process: write output to a log file, and end when the parent
    process ends."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="parent-watch", daemon=True).start()
    sys.argv = [config]
    run(config, *facts)


def run_core(config: str, clock: str) -> None:
    WallClock(Path(clock)).install()
    create = serving.create_app

    def create_app(core: ServeCore, *args: Any) -> FastAPI:
        app = create(core, *args)
        _give_account(app, core.check_integrity, lambda: _core_account(core))
        return app

    serving.create_app = create_app
    core_server.main(["--config_path", config])


def run_engine(config: str, clock: str, calls: str, advertised: int) -> None:
    """Run an engine that registers with the port `advertised` and logs its calls to `calls`."""
    WallClock(Path(clock)).install()
    create, log = engine_server.create_app, AnswerLog(Path(calls))

    def create_app(service: Any, *args: Any) -> FastAPI:
        log.install(service)
        app, info = create(service, *args), service.engine_info
        service.engine_info = lambda: info().model_copy(update={"port": advertised})
        _give_account(app, service.check_integrity, lambda: _engine_account(service))
        return app

    engine_server.create_app = create_app
    engine_server.main(["--config_path", config])


def _give_account(
    app: FastAPI, check: Callable[[], None], account: Callable[[], dict[str, Any]]
) -> None:
    async def answer(request: Request) -> Response:
        broken = ""
        try:
            check()
        except AssertionError as error:
            broken = f"{type(error).__name__}: {error}"
        return JSONResponse({"broken": broken, **account()})

    app.router.routes.append(RuledRoute(ACCOUNT, answer, Access.ANYBODY, methods=["GET"]))


def _core_account(core: ServeCore) -> dict[str, Any]:
    engines = core.fleet.views()
    return {
        "sessions": len(core.sessions),
        "queued": core.num_queued,
        "running": sum(engine.num_running for engine in engines),
        "contexts": {engine.info.engine_name: engine.num_contexts for engine in engines},
    }


def _engine_account(service: Any) -> dict[str, Any]:
    info, core = service.runtime_info(), service._core
    contexts = 0 if core is None else sum(1 for _ in core._tree)
    return {"jobs": info.num_total_jobs, "contexts": contexts, "steps": info.num_steps}
