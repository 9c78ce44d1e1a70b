"""What can happen to a service, each by its name."""

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
    """One ServeCore, one with its standby and a database, or two shards with engines of their
    own."""

    ONE = "one"
    STANDBY = "standby"
    SHARDS = "shards"


class Fault(NamedTuple):
    """`run` disturbs, waits, and heals; returns whom it was done to. `loses_engine`: calls that run
    may lose their engine by it. `layouts`: of services to which it can happen; `of_ranks`: only
    to engines that are divided."""

    run: Callable[[Service, random.Random], Awaitable[str]]
    loses_engine: bool = True
    layouts: frozenset[Layout] = frozenset(Layout)
    of_ranks: bool = False

    def suits(self, layout: Layout, engine: str) -> bool:
        return layout in self.layouts and (engine == DIVIDED or not self.of_ranks)


_ENDED_S = 60.0  # of an engine that has lost a rank, on a busy machine
_STANDBY = frozenset({Layout.STANDBY})
_TWO = frozenset({Layout.STANDBY, Layout.SHARDS})
_FILES = frozenset({Layout.ONE, Layout.SHARDS})


@asynccontextmanager
async def _held(service: Service, *names: str) -> AsyncIterator[None]:
    """Nobody else disturbs these servers meanwhile."""
    async with AsyncExitStack() as stack:
        for name in sorted(names):
            await stack.enter_async_context(service.lock(name))
        yield


def _pick(service: Service, draw: random.Random) -> str:
    return draw.choice(sorted(service.engines))


async def _kill(service: Service, draw: random.Random, *servers: Server) -> None:
    """Kill them at once, and start them again a moment later."""
    down_s = draw.choice([0.0, draw.uniform(0.0, 0.5)])
    await service.kill(*servers)
    await asyncio.sleep(down_s)
    for server in servers:
        server.start()


async def kill_engine(service: Service, draw: random.Random) -> str:
    name = _pick(service, draw)
    async with _held(service, name):
        await _kill(service, draw, service.engines[name])
    return name


async def kill_rank(service: Service, draw: random.Random) -> str:
    """One of the processes that an engine is divided among, which ends the others."""
    name = _pick(service, draw)
    async with _held(service, name):
        server = service.engines[name]
        if ranks := server.ranks:
            os.kill(draw.choice(ranks), signal.SIGKILL)
            service.kills["engine"] += 1
            await asyncio.wait_for(server.ended(), _ENDED_S)
            server.start()
        else:  # it is still starting
            await _kill(service, draw, server)
    return name


async def kill_core(service: Service, draw: random.Random) -> str:
    async with _held(service, CORES):
        server = service.cores[service.pick_core(draw)]
        await _kill(service, draw, server)
    return server.name


async def kill_cores(service: Service, draw: random.Random) -> str:
    """The one that serves and its standby at once, or all shards."""
    async with _held(service, CORES):
        await _kill(service, draw, *service.cores)
    return CORES


async def kill_standby(service: Service, draw: random.Random) -> str:
    async with _held(service, CORES):
        server = service.cores[1 - service.serving]
        await _kill(service, draw, server)
    return server.name


async def kill_both(service: Service, draw: random.Random) -> str:
    name = _pick(service, draw)
    async with _held(service, name, CORES):
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
    async with _held(service, name):
        await _freeze(service.engines[name], draw)
    return name


async def stop_core(service: Service, draw: random.Random) -> str:
    async with _held(service, CORES):
        server = service.cores[service.pick_core(draw)]
        await _freeze(server, draw)
    return server.name


async def restart_engine(service: Service, draw: random.Random) -> str:
    """Asked to end, and started again under its name."""
    name = _pick(service, draw)
    async with _held(service, name):
        await service.engines[name].stop()
        service.engines[name].start()
    return name


async def twin_engine(service: Service, draw: random.Random) -> str:
    """An engine hangs, another is started under its name elsewhere, and the first wakes up."""
    name = _pick(service, draw)
    async with _held(service, name):
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
    async with _held(service, CORES):
        server = service.cores[service.pick_core(draw)]
        await server.stop()
        server.start()
    return server.name


async def rolling_restart(service: Service, draw: random.Random) -> str:
    """All servers in turn, each when the one before is back."""
    servers = [*service.cores, *service.engines.values()]
    for server in draw.sample(servers, len(servers)):
        async with _held(service, CORES if server in service.cores else server.name):
            await server.stop()
            server.start()
            await service.ready()
    return "all in turn"


async def kill_database(service: Service, draw: random.Random) -> str:
    assert service.database is not None
    async with _held(service, DATABASE):
        await asyncio.to_thread(service.database.kill)
        await asyncio.sleep(draw.choice([0.0, draw.uniform(0.0, 5.0)]))
        await asyncio.to_thread(service.database.start)
    return DATABASE


async def stop_database(service: Service, draw: random.Random) -> str:
    assert service.database is not None
    async with _held(service, DATABASE):
        service.database.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(draw.choice([draw.uniform(0.05, 1.0), draw.uniform(2.0, 8.0)]))
        finally:
            service.database.signal(signal.SIGCONT)
    return DATABASE


def on_link(choose: Callable[[Service, random.Random], tuple[str, Link]], how: str) -> Fault:
    """A fault of a link: `reset`, `stall`, `half_open` or `delay`."""

    async def run(service: Service, draw: random.Random) -> str:
        name, link = choose(service, draw)
        async with _held(service, name):
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
    # An engine of a shard has a link to that shard alone.
    return f"{name}-core", links[0 if service.has_shards else service.serving]


async def disk_full(service: Service, draw: random.Random) -> str:
    async with _held(service, CORES):
        server = service.cores[service.pick_core(draw)]
        server.fill_disk(draw.choice([0, 1000, 20_000]))
        await asyncio.sleep(draw.uniform(0.2, 1.5))
        if draw.random() < 0.5:
            server.make_room()
        else:  # what could not be written is lost with it
            await service.kill(server)
        if not server.is_alive:  # the limit is gone with its process
            server.start()
    return server.name


async def disk_full_kills(service: Service, draw: random.Random) -> str:
    """The disk is full, and stays so while ServeCore is killed and started again."""
    async with _held(service, CORES):
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
    """ServeCore is asked to end while the disk is full."""
    async with _held(service, CORES):
        server = service.cores[service.pick_core(draw)]
        server.fill_disk(draw.choice([0, 1000]))
        await asyncio.sleep(draw.uniform(0.2, 1.0))
        await server.stop()
        server.start()
    return server.name


async def late_engines(service: Service, draw: random.Random) -> str:
    """All engines of a model are gone for longer than every timeout, with ServeCore or without."""
    others = service.others if draw.random() < 0.5 else set()
    names = sorted(others or service.engines.keys() - service.others)
    with_core = draw.random() < 0.5
    async with _held(service, *names, *([CORES] if with_core else [])):
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
    """A fault of all links at once: between every two processes."""

    async def run(service: Service, draw: random.Random) -> str:
        links = [*service.client_links, *service.database_links]
        for one in service.links.values():
            links += [one.to_engine, *one.to_cores]
        async with _held(service, "all links"):
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
    """The wall clock is set back, and ServeCore starts again at a time that was already."""
    service.clock.step(-draw.choice([0.5, 60.0, 3600.0, 86_400.0]))
    await asyncio.sleep(draw.uniform(0.0, 0.3))
    return await kill_core(service, draw)


async def clock_step(service: Service, draw: random.Random) -> str:
    """The wall clock jumps, and ServeCore may start again meanwhile."""
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
