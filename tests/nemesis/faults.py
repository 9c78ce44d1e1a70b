"""The faults that the nemesis injects into a service, by name."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from typing import NamedTuple

from tests.nemesis.history import CLOCK_BACK, CLOCK_STEP, DISK_FULL
from tests.nemesis.link import Link
from tests.nemesis.servers import Server
from tests.nemesis.service import CORES, DIVIDED, LATE_S, Service

DATABASE = "database"


class Layout(StrEnum):
    """One ServeCore, a ServeCore with a standby and a database, or two shards with separate
    engines."""

    ONE = "one"
    STANDBY = "standby"
    SHARDS = "shards"


class Fault(NamedTuple):
    """`run` injects the fault, waits, repairs it, and returns the name of its target."""

    run: Callable[[Service, random.Random], Awaitable[str]]
    loses_engine: bool = True  # running calls may lose their engine
    layouts: frozenset[Layout] = frozenset(Layout)  # layouts that can have this fault
    of_ranks: bool = False  # only engines with tensor parallelism can have this fault

    def suits(self, layout: Layout, engine: str) -> bool:
        return layout in self.layouts and (engine == DIVIDED or not self.of_ranks)


_ENDED_S = 60.0  # Limit for an engine to end after it has lost a rank. The machine may be busy.
_STANDBY = frozenset({Layout.STANDBY})
_TWO = frozenset({Layout.STANDBY, Layout.SHARDS})
_FILES = frozenset({Layout.ONE, Layout.SHARDS})


@asynccontextmanager
async def _locked(service: Service, *names: str) -> AsyncIterator[None]:
    """Keep other faults away from these servers."""
    async with AsyncExitStack() as stack:
        for name in sorted(names):
            await stack.enter_async_context(service.lock(name))
        yield


def _pick(service: Service, draw: random.Random) -> str:
    return draw.choice(sorted(service.engines))


async def _kill(service: Service, draw: random.Random, *servers: Server) -> None:
    """Kill servers at the same time, and start them again up to 0.5 s later."""
    down_s = draw.choice([0.0, draw.uniform(0.0, 0.5)])
    await service.kill(*servers)
    await asyncio.sleep(down_s)
    for server in servers:
        server.start()


async def kill_engine(service: Service, draw: random.Random) -> str:
    name = _pick(service, draw)
    async with _locked(service, name):
        await _kill(service, draw, service.engines[name])
    return name


async def kill_rank(service: Service, draw: random.Random) -> str:
    """Kill one process of an engine with tensor parallelism. The others must end, too."""
    name = _pick(service, draw)
    async with _locked(service, name):
        server = service.engines[name]
        if ranks := server.ranks:
            os.kill(draw.choice(ranks), signal.SIGKILL)
            service.kills["engine"] += 1
            await asyncio.wait_for(server.ended(), _ENDED_S)
            server.start()
        else:  # the engine is still starting
            await _kill(service, draw, server)
    return name


async def kill_core(service: Service, draw: random.Random) -> str:
    async with _locked(service, CORES):
        server = service.cores[service.pick_core(draw)]
        await _kill(service, draw, server)
    return server.name


async def kill_cores(service: Service, draw: random.Random) -> str:
    """Kill the active ServeCore and its standby, or all shards, at the same time."""
    async with _locked(service, CORES):
        await _kill(service, draw, *service.cores)
    return CORES


async def kill_standby(service: Service, draw: random.Random) -> str:
    async with _locked(service, CORES):
        server = service.cores[1 - service.serving]
        await _kill(service, draw, server)
    return server.name


async def kill_both(service: Service, draw: random.Random) -> str:
    name = _pick(service, draw)
    async with _locked(service, name, CORES):
        server = service.cores[service.pick_core(draw)]
        await _kill(service, draw, server, service.engines[name])
    return f"{server.name}, {name}"


async def _freeze(server: Server, draw: random.Random) -> None:
    server.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(draw.choice([draw.uniform(0.05, 1.0), draw.uniform(2.0, 4.0)]))
    finally:
        server.signal(signal.SIGCONT)


async def stop_engine(service: Service, draw: random.Random) -> str:
    name = _pick(service, draw)
    async with _locked(service, name):
        await _freeze(service.engines[name], draw)
    return name


async def stop_core(service: Service, draw: random.Random) -> str:
    async with _locked(service, CORES):
        server = service.cores[service.pick_core(draw)]
        await _freeze(server, draw)
    return server.name


async def restart_engine(service: Service, draw: random.Random) -> str:
    """Terminate an engine, and start it again with the same name."""
    name = _pick(service, draw)
    async with _locked(service, name):
        await service.engines[name].stop()
        service.engines[name].start()
    return name


async def twin_engine(service: Service, draw: random.Random) -> str:
    """Stop an engine with SIGSTOP, start another with the same name, and let the first continue."""
    name = _pick(service, draw)
    async with _locked(service, name):
        port = service.new_port()
        first, twin = service.engines[name], service.engine(name, port, port)
        twin.log = first.log
        first.signal(signal.SIGSTOP)
        twin.start()
        await asyncio.sleep(draw.uniform(0.3, 3.0))
        first.signal(signal.SIGCONT)
        await asyncio.sleep(draw.uniform(0.3, 1.0))
        await twin.kill()
    return name


async def restart_core(service: Service, draw: random.Random) -> str:
    async with _locked(service, CORES):
        server = service.cores[service.pick_core(draw)]
        await server.stop()
        server.start()
    return server.name


async def rolling_restart(service: Service, draw: random.Random) -> str:
    """Restart all servers one after the other. Each must be ready before the next restarts."""
    servers = [*service.cores, *service.engines.values()]
    for server in draw.sample(servers, len(servers)):
        async with _locked(service, CORES if server in service.cores else server.name):
            await server.stop()
            server.start()
            await service.ready()
    return "all in turn"


async def kill_database(service: Service, draw: random.Random) -> str:
    assert service.database is not None
    async with _locked(service, DATABASE):
        await asyncio.to_thread(service.database.kill)
        await asyncio.sleep(draw.choice([0.0, draw.uniform(0.0, 5.0)]))
        await asyncio.to_thread(service.database.start)
    return DATABASE


async def stop_database(service: Service, draw: random.Random) -> str:
    assert service.database is not None
    async with _locked(service, DATABASE):
        service.database.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(draw.choice([draw.uniform(0.05, 1.0), draw.uniform(2.0, 8.0)]))
        finally:
            service.database.signal(signal.SIGCONT)
    return DATABASE


def on_link(choose: Callable[[Service, random.Random], tuple[str, Link]], how: str) -> Fault:
    """Return a fault of one link: `reset`, `stall`, `half_open` or `delay`."""

    async def run(service: Service, draw: random.Random) -> str:
        name, link = choose(service, draw)
        async with _locked(service, name):
            try:
                if how == "delay":
                    link.delay_s = draw.uniform(0.01, 0.2)
                else:
                    getattr(link, how)()
                if how != "reset":
                    long_s = draw.uniform(1.0, 3.0)
                    await asyncio.sleep(draw.choice([draw.uniform(0.05, 0.5), long_s]))
            finally:
                link.heal()
        return name

    layouts = _STANDBY if choose is _to_database else frozenset(Layout)
    return Fault(run, choose is not _client_link, layouts)


def _client_link(service: Service, draw: random.Random) -> tuple[str, Link]:
    number = service.pick_core(draw)
    return f"client-{service.cores[number].name}", service.client_links[number]


def _to_database(service: Service, draw: random.Random) -> tuple[str, Link]:
    return "core-database", service.database_links[service.serving]


def _to_engine(service: Service, draw: random.Random) -> tuple[str, Link]:
    name = _pick(service, draw)
    return f"core-{name}", service.links[name].to_engine


def _to_core(service: Service, draw: random.Random) -> tuple[str, Link]:
    name = _pick(service, draw)
    links = service.links[name].to_cores
    # An engine of a shard has a link to that shard only.
    return f"{name}-core", links[0 if service.has_shards else service.serving]


async def disk_full(service: Service, draw: random.Random) -> str:
    async with _locked(service, CORES):
        server = service.cores[service.pick_core(draw)]
        server.fill_disk(draw.choice([0, 1000, 20_000]))
        await asyncio.sleep(draw.uniform(0.2, 1.5))
        if draw.random() < 0.5:
            server.make_room()
        else:  # records that could not be written are lost
            await service.kill(server)
        if not server.is_alive:  # the new process has no limit
            server.start()
    return server.name


async def disk_full_kills(service: Service, draw: random.Random) -> str:
    """Kill ServeCore and start it again while the disk is full."""
    async with _locked(service, CORES):
        server = service.cores[service.pick_core(draw)]
        server.fill_disk(draw.choice([0, 1000, 20_000]))
        try:
            for _ in range(draw.randint(1, 3)):
                await asyncio.sleep(draw.uniform(0.2, 1.0))
                await service.kill(server)
                server.start()
                server.fill_disk(draw.choice([0, 0, 20_000]))
            await asyncio.sleep(draw.uniform(0.2, 1.0))
        finally:
            server.make_room()
            if not server.is_alive:
                server.start()
    return server.name


async def disk_full_stop(service: Service, draw: random.Random) -> str:
    """Terminate ServeCore while the disk is full."""
    async with _locked(service, CORES):
        server = service.cores[service.pick_core(draw)]
        server.fill_disk(draw.choice([0, 1000]))
        await asyncio.sleep(draw.uniform(0.2, 1.0))
        await server.stop()
        server.start()
    return server.name


async def late_engines(service: Service, draw: random.Random) -> str:
    """Kill all engines of a model, and perhaps ServeCore. The engines start again only after all
    timeouts about engines have expired."""
    others = service.others if draw.random() < 0.5 else set()
    names = sorted(others or service.engines.keys() - service.others)
    with_core = draw.random() < 0.5
    async with _locked(service, *names, *([CORES] if with_core else [])):
        engines = [service.engines[name] for name in names]
        core = service.cores[service.pick_core(draw)]
        await service.kill(*engines, *([core] if with_core else []))
        if with_core:
            core.start()
        await asyncio.sleep(LATE_S)
        for engine in engines:
            engine.start()
    return ", ".join([*names, *([core.name] if with_core else [])])


def on_all_links(how: str) -> Fault:
    """Return a fault of all links at the same time."""

    async def run(service: Service, draw: random.Random) -> str:
        links = [*service.client_links, *service.database_links]
        for one in service.links.values():
            links += [one.to_engine, *one.to_cores]
        async with _locked(service, "all links"):
            try:
                for link in links:
                    if how == "delay":
                        link.delay_s = draw.uniform(0.01, 0.2)
                    else:
                        getattr(link, how)()
                if how != "reset":
                    await asyncio.sleep(draw.uniform(0.1, 3.0))
            finally:
                for link in links:
                    link.heal()
        return "all links"

    return Fault(run)


async def clock_back(service: Service, draw: random.Random) -> str:
    """Set the wall clock back, and restart ServeCore, so that times repeat."""
    service.clock.step(-draw.choice([0.5, 60.0, 3600.0, 86_400.0]))
    await asyncio.sleep(draw.uniform(0.0, 0.3))
    return await kill_core(service, draw)


async def clock_step(service: Service, draw: random.Random) -> str:
    """Change the wall clock, and perhaps restart ServeCore."""
    service.clock.step(draw.choice([-1, 1]) * draw.choice([0.5, 60.0, 3600.0, 86_400.0]))
    await asyncio.sleep(draw.uniform(0.1, 0.5))
    if draw.random() < 0.5:
        return await kill_core(service, draw)
    return "wall clock"


FAULTS: dict[str, Fault] = {
    "kill-engine": Fault(kill_engine),
    "kill-rank": Fault(kill_rank, of_ranks=True),
    "kill-core": Fault(kill_core),
    "kill-both": Fault(kill_both),
    "stop-engine": Fault(stop_engine),
    "stop-core": Fault(stop_core),
    "restart-engine": Fault(restart_engine),
    "restart-core": Fault(restart_core),
    "twin-engine": Fault(twin_engine),
    "rolling-restart": Fault(rolling_restart),
    "kill-cores": Fault(kill_cores, layouts=_TWO),
    "kill-standby": Fault(kill_standby, loses_engine=False, layouts=_STANDBY),
    "kill-database": Fault(kill_database, layouts=_STANDBY),
    "stop-database": Fault(stop_database, layouts=_STANDBY),
    DISK_FULL: Fault(disk_full, layouts=_FILES),
    "disk-full-kills": Fault(disk_full_kills, layouts=_FILES),
    "disk-full-stop": Fault(disk_full_stop, layouts=_FILES),
    "late-engines": Fault(late_engines),
    CLOCK_STEP: Fault(clock_step),
    CLOCK_BACK: Fault(clock_back),
    **{f"all-links-{how}": on_all_links(how) for how in ("reset", "stall", "delay")},
    **{
        f"{where}-{how.replace('_', '-')}": on_link(choose, how)
        for where, choose in (
            ("client-core", _client_link),
            ("core-engine", _to_engine),
            ("engine-core", _to_core),
            ("core-database", _to_database),
        )
        for how in ("reset", "stall", "half_open", "delay")
    },
}
