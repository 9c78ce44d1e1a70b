"""What can happen to a service, each by its name."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from benchmark.nemesis.history import CLOCK_STEP, DISK_FULL
from benchmark.nemesis.link import Link
from benchmark.nemesis.servers import Server
from benchmark.nemesis.service import Service

CORE = "serve-core"


class Fault(NamedTuple):
    """`run` disturbs, waits, and heals; returns whom it was done to. `loses_engine`: calls that run
    may lose their engine by it."""

    run: Callable[[Service, random.Random], Awaitable[str]]
    loses_engine: bool = True


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


async def kill_core(service: Service, draw: random.Random) -> str:
    async with _held(service, CORE):
        await _kill(service, draw, service.core)
    return CORE


async def kill_both(service: Service, draw: random.Random) -> str:
    name = _pick(service, draw)
    async with _held(service, name, CORE):
        await _kill(service, draw, service.core, service.engines[name])
    return f"{CORE}, {name}"


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
    async with _held(service, CORE):
        await _freeze(service.core, draw)
    return CORE


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
        beat, port = service.links[name].to_core.port, service.new_port()
        first, twin = service.engines[name], service.engine(name, port, beat, port)
        twin.log = first.log
        first.signal(signal.SIGSTOP)
        twin.start()
        await asyncio.sleep(draw.uniform(0.3, 3.0))
        first.signal(signal.SIGCONT)
        await asyncio.sleep(draw.uniform(0.3, 1.0))
        await twin.kill()
    return name


async def restart_core(service: Service, draw: random.Random) -> str:
    async with _held(service, CORE):
        await service.core.stop()
        service.core.start()
    return CORE


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

    return Fault(run, loses_engine=choose is not _client_link)


def _client_link(service: Service, draw: random.Random) -> tuple[str, Link]:
    return "client-core", service.client_link


def _to_engine(service: Service, draw: random.Random) -> tuple[str, Link]:
    name = _pick(service, draw)
    return f"core-{name}", service.links[name].to_engine


def _to_core(service: Service, draw: random.Random) -> tuple[str, Link]:
    name = _pick(service, draw)
    return f"{name}-core", service.links[name].to_core


async def disk_full(service: Service, draw: random.Random) -> str:
    async with _held(service, CORE):
        service.core.fill_disk(draw.choice([0, 1000, 20_000]))
        await asyncio.sleep(draw.uniform(0.2, 1.5))
        if draw.random() < 0.5:
            service.core.make_room()
        else:  # what could not be written is lost with it
            await service.kill(service.core)
        if not service.core.is_alive:  # the limit is gone with its process
            service.core.start()
    return CORE


async def clock_step(service: Service, draw: random.Random) -> str:
    """The wall clock jumps, and ServeCore may start again meanwhile."""
    service.clock.step(draw.choice([-1, 1]) * draw.choice([0.5, 60.0, 3600.0, 86_400.0]))
    await asyncio.sleep(draw.uniform(0.1, 0.5))
    if draw.random() < 0.5:
        return await kill_core(service, draw)
    return "wall clock"


FAULTS: dict[str, Fault] = {
    "kill-engine": Fault(kill_engine),
    "kill-core": Fault(kill_core),
    "kill-both": Fault(kill_both),
    "stop-engine": Fault(stop_engine),
    "stop-core": Fault(stop_core),
    "restart-engine": Fault(restart_engine),
    "restart-core": Fault(restart_core),
    "twin-engine": Fault(twin_engine),
    DISK_FULL: Fault(disk_full),
    CLOCK_STEP: Fault(clock_step),
    **{
        f"{where}-{how.replace('_', '-')}": on_link(choose, how)
        for where, choose in (
            ("client-core", _client_link),
            ("core-engine", _to_engine),
            ("engine-core", _to_core),
        )
        for how in ("reset", "stall", "half_open", "delay")
    },
}
