"""Registers an engine with ServeCore and sends its heartbeats.

An engine makes no other calls on its own."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from parrot.engine.app import EngineFront, Fence, ReorderBuffer
from parrot.engine.config import EngineConfig
from parrot.engine.core.steps import DeviceLost
from parrot.engine.service import EngineService, ServiceState
from parrot.protocol.engine_api import (
    EngineInfo,
    HeartbeatResponse,
    RegisterResponse,
)
from parrot.protocol.engine_client import CoreIdentity
from parrot.protocol.errors import InternalError, ParrotError, Standby, Unavailable
from parrot.protocol.failover_client import client_of
from parrot.protocol.registration_client import RegistrationClient
from parrot.protocol.transport import Unreachable
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.logs import LastWarning

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_RETRY_S = 0.25  # Delay before the first retry, in seconds. Each further delay is doubled.
MAX_RETRY_S = 5.0  # Longest delay before a retry, in seconds.
# An engine that binds to one of these hosts reports the address of an interface instead.
_WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})


class Registered(NamedTuple):
    """Where and how an engine registers."""

    interval_s: float  # Seconds between two heartbeats.
    cores: Sequence[tuple[str, int]]  # Host and port of ServeCore and of its standbys.
    incarnation: str = ""  # Identifies this start of the engine.


class Heartbeat:
    """Keeps one engine registered until its task is cancelled.

    ServeCore may start later than the engine, restart, or give the engine up. The engine then
    registers again under the same name, and all its contexts are freed."""

    # Contexts belong to the ServeCore that created them, and the next ServeCore uses the same ids.
    # So all contexts are freed in three cases: ServeCore does not know the engine, it has not
    # answered for its lease, or it may have accepted a registration without answering. The contexts
    # of direct callers are freed only when a ServeCore has accepted the engine. Cached blocks stay,
    # so calls that run again find their prefixes.

    def __init__(
        self,
        client: RegistrationClient,
        service: EngineService,
        reorder: ReorderBuffer,
        fence: Fence,
        clock: Clock,
        where: Registered,
        warnings: LastWarning,
    ) -> None:
        self._where = where
        self._warnings = warnings
        self._client = client
        self._service = service
        self._reorder = reorder
        self._fence = fence
        self._clock = clock
        self._terms: RegisterResponse | None = None  # None while the engine is not registered.
        self._is_leaving = False

    async def run(self) -> None:
        """Register and send heartbeats until the engine has left or shuts down.

        Raises `DeviceLost`."""
        while not self._is_leaving:
            self._terms = None
            if self._is_ending():
                return
            terms = self._terms = await self._until_answered(self._register)
            name = self._service.engine_info().engine_name
            logger.info("registered as engine %d (%s)", terms.engine_id, name)
            await self._beat_while_known(terms, name)
            if not self._is_ending():
                self._fence.released()
                await self._end_work()

    def _is_ending(self) -> bool:
        """Whether the engine shuts down. Raises `DeviceLost` if its device is lost."""
        # Such an engine must not register again: each call that it gets would count as a loss.
        state = self._service.state()
        if state is ServiceState.LOST:
            name = self._service.engine_info().engine_name
            raise DeviceLost(f"engine {name} can no longer serve: its device is lost")
        return state is ServiceState.CLOSED

    async def close(self) -> None:
        await self._client.close()

    async def leave(self, timeout_s: float) -> None:
        """Ask ServeCore for no further calls, and wait until the running calls have finished.

        Returns after `timeout_s` at the latest, or at once if the engine is not registered. The
        engine does not register again."""
        self._is_leaving = True
        if self._terms is None:
            return
        engine_id, core = self._terms.engine_id, self._terms.core
        logger.info("leaving ServeCore; running calls have %g s to finish", timeout_s)
        try:
            answer = await self._client.engine_leave(engine_id, core, timeout_s)
        except ParrotError as error:
            logger.warning("ServeCore does not wait for the running calls: %s", error.message)
        else:
            if answer.num_calls:
                logger.warning(
                    "%d calls have not finished; ServeCore runs them on other engines",
                    answer.num_calls,
                )

    async def _register(self) -> RegisterResponse:
        """Register, and cancel the work for the previous ServeCore.

        The new ServeCore's first requests wait for that (`Fence.answer`). If the registration may
        have been accepted without an answer, the work is cancelled as well."""
        info = await reachable(self._service.engine_info(), self._where.cores)
        names = {
            "incarnation": self._where.incarnation,
            "registration": self._fence.begin_registration(),
        }
        try:
            terms = await self._client.register_engine(info.model_copy(update=names))
            self._fence.begin_era()
            await self._end_work()
            self._fence.registered(CoreIdentity(terms.epoch, terms.core))
            return terms
        except ParrotError as error:
            if not _is_refusal(error):
                self._fence.released()
                await self._end_work()
            raise
        finally:
            self._fence.end_registration()

    async def _end_work(self) -> None:
        """Cancel all jobs and free all contexts. The fence must have begun a new era."""
        self._reorder.reset()
        await self._service.reset()

    async def _beat_while_known(self, terms: RegisterResponse, name: str) -> None:
        """Send heartbeats until ServeCore does not know this engine, or the lease has expired.

        Raises `DeviceLost`."""
        engine_id = terms.engine_id
        asked = self._clock.now()
        told: dict[int, int] = {}  # Number of output tokens reported so far, by context.
        # After a failure the next heartbeat has no outputs: a busy server may reject large bodies.
        has_failed = False

        async def beat() -> HeartbeatResponse:
            nonlocal asked, told, has_failed
            asked = self._clock.now()  # The lease starts at the attempt that succeeds.
            runtime = self._service.runtime_info(None if has_failed else told)
            reached = {part.context_id: part.end for part in runtime.outputs}
            new = {
                "outputs": [part for part in runtime.outputs if part.ids],
                "last_warning": self._warnings.text,
                "warned_at": self._warnings.at,
            }
            runtime = runtime.model_copy(update=new)
            went_without, has_failed = has_failed, True
            answer = await self._client.engine_heartbeat(engine_id, name, runtime, terms.core)
            told, has_failed = told if went_without else reached, False
            return answer

        while True:
            await self._clock.sleep(self._where.interval_s)
            if self._is_ending():
                return
            expiry = None if terms.lease_s is None else asked + terms.lease_s
            answer = await self._before(expiry, self._until_answered(beat))
            if answer is None:
                logger.warning(
                    "ServeCore has not answered for %g s: all work is cancelled", terms.lease_s
                )
                return
            if answer.state == "unknown":
                logger.warning("ServeCore no longer knows engine %d", engine_id)
                return

    async def _before(self, when: float | None, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if it has not finished at time `when`. It is then cancelled.

        `when` None waits without a limit."""
        if when is None:
            return await work
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self._clock.sleep(max(0.0, when - self._clock.now())))
        try:
            await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            waiting.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retry `call` with exponential backoff until it succeeds."""
        delay_s = FIRST_RETRY_S
        reason: type[ParrotError] | None = None
        while True:
            try:
                return await call()
            except ParrotError as error:
                if type(error) is not reason:  # Log a reason once, and not at each attempt.
                    logger.warning("ServeCore: %s; retrying", error.message)
                reason = type(error)
            await self._clock.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_RETRY_S)


def _is_refusal(error: ParrotError) -> bool:
    """Whether a failed registration was certainly not accepted by any ServeCore."""
    return isinstance(error, Unreachable | Standby) or error.status < InternalError.status


async def reachable(info: EngineInfo, cores: Sequence[tuple[str, int]]) -> EngineInfo:
    """`info` with a host that ServeCore can call.

    An engine that is bound to all interfaces reports the address of the interface with a route to
    the first reachable of `cores`. Raises `Unavailable` if none is reachable."""
    if info.host not in _WILDCARD_HOSTS:
        return info
    host = await asyncio.to_thread(_own_address, cores)
    return info.model_copy(update={"host": host})


def _own_address(cores: Sequence[tuple[str, int]]) -> str:
    *others, last = cores
    for core in others:
        with suppress(Unavailable):
            return _own_address_towards(*core)
    return _own_address_towards(*last)


def _own_address_towards(host: str, port: int) -> str:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)  # A datagram socket only chooses a route and sends nothing.
            own: str = probe.getsockname()[0]
            return own
    except OSError as error:
        raise Unavailable(f"cannot reach {host}: {error.strerror}") from None


def registration(
    config: EngineConfig, front: EngineFront, warnings: LastWarning, incarnation: str = ""
) -> Heartbeat:
    """The heartbeat of an engine, for the ServeCore and the standbys of its config."""
    cores = [(core.host, core.port) for core in (config.serve_core, *config.standby_cores)]
    urls = [f"http://{host}:{port}" for host, port in cores]
    return Heartbeat(
        RegistrationClient(client_of(urls, bearer_token=config.cluster_token)),
        front.service,
        front.reorder,
        front.fence,
        MonotonicClock(),
        Registered(config.beat_s, cores, incarnation),
        warnings,
    )
