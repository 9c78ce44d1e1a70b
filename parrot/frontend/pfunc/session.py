"""A program's session at a ServeCore: every exchange of the front end goes through here."""

import asyncio
import atexit
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from parrot.frontend.pfunc.background import BackgroundLoop
from parrot.frontend.pfunc.read_options import ReadOptions
from parrot.protocol.errors import (
    AlreadySet,
    ParrotError,
    QueueFull,
    TimedOut,
    Unavailable,
    ValidationFailed,
)
from parrot.protocol.failover_client import LivenessProbe, client_of
from parrot.protocol.public import (
    CallResponse,
    GraphRequest,
    GraphResponse,
    GraphVariable,
    NativeCallRequest,
    NativeGraphCall,
    SemanticCallRequest,
    SemanticGraphCall,
    SessionInfo,
    VarGetResponse,
    VarValue,
)
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.transport import Unreachable
from parrot.utils.ids import new_token
from parrot.utils.traceparent import current_traceparent

logger = logging.getLogger("parrot.frontend.pfunc")

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_NUM_CALL_CONNECTIONS = 32
_NUM_READ_CONNECTIONS = 512  # each pending read holds one
_NUM_TRIALS = 256  # that are watched at a time; each has a connection to itself
_NUM_ATTEMPTS = 3
_ROOM_TIMEOUT_S = 60.0
_MAX_ROOM_PAUSE_S = 1.0
_READ_MARGIN_S = 1.0  # the server ends a read at its timeout; after this we do
_CLOSE_TIMEOUT_S = 5.0
_LIVENESS_INTERVAL_S = 30.0
_NOBODY_THERE = (
    "Start a ServeCore there (`parrot up embedded`), or give another's address to P.VirtualMachine"
)


class Session:
    """One session. Its coroutines run on its own `loop`.

    Reads, calls and cancellations are tried again when the connection breaks (a call carries an
    idempotency key); making a session or a variable and setting one are not. Calls and reads also
    wait for a full queue to have room again, up to a minute."""

    def __init__(
        self,
        core_http_addr: str,
        api_key: str | None = None,
        *,
        on_demand: bool = False,
        app: str | None = None,
        restart_timeout_s: float | None = None,
    ) -> None:
        """Raises `Unavailable` if nobody answers there, `AuthenticationFailed` for a bad key."""
        self.loop = BackgroundLoop()
        self.contexts: dict[Hashable, int] = {}
        """The requests whose contexts the next calls continue, by function."""
        urls = core_http_addr.split(",")
        self._calls = ServeClient(client_of(urls, max_connections=_NUM_CALL_CONNECTIONS))
        self._reads = ServeClient(client_of(urls, max_connections=_NUM_READ_CONNECTIONS))
        self._watches = ServeClient(client_of(urls, max_connections=_NUM_TRIALS))
        # Reads of trials wait for no others: in this order, each needs only those before it.
        self.trial_slots = asyncio.Semaphore(_NUM_TRIALS)
        self.trials: set[asyncio.Task[None]] = set()
        self.registering = asyncio.Lock()
        """Held while variables are registered, so that two calls never register the same one."""
        # Behind a first attempt whose connection broke.
        self._retrying: dict[str, Any] = {"attempts": _NUM_ATTEMPTS - 1, "timeout": None}
        if restart_timeout_s is not None:
            self._retrying = {"attempts": None, "timeout": restart_timeout_s, "wait_max": 1.0}
        self._liveness = LivenessProbe(self._calls.health, _LIVENESS_INTERVAL_S)
        try:
            created = self.loop.run(
                self._calls.create_session(
                    api_key,
                    None if app is None else [app],
                    on_demand=on_demand,
                    traceparent=current_traceparent(),
                )
            )
        except BaseException as error:
            self.loop.close(self._calls.close)
            if isinstance(error, Unavailable) and isinstance(error.__cause__, OSError):
                raise Unavailable(f"{error.message}. {_NOBODY_THERE}") from None
            raise
        self.session_id = created.session_id
        self._fields = created.model_dump()
        self._scope = (created.session_id, created.session_auth)
        atexit.register(self.close)

    def close(self) -> None:
        """End the session at the server, and every read that is still pending here. Never raises
        for a server that does not answer: a session that nobody uses expires."""
        atexit.unregister(self.close)
        self.loop.close(self._leave)

    async def semantic_call(self, subject: str, payload: dict[str, Any]) -> CallResponse:
        """`subject`: what an invalid payload is said to be of."""
        request = checked(SemanticCallRequest, subject, self._completed(payload))
        return await self._when_there_is_room(partial(self._calls.semantic_call, request))

    async def native_call(self, subject: str, payload: dict[str, Any]) -> CallResponse:
        request = checked(NativeCallRequest, subject, self._completed(payload))
        return await self._when_there_is_room(partial(self._calls.native_call, request))

    def _completed(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload | self._fields | {"idempotency_key": new_token()}

    async def submit_graph(
        self,
        variables: list[GraphVariable],
        calls: list[SemanticGraphCall | NativeGraphCall],
    ) -> GraphResponse:
        """All of it, or nothing."""
        request = GraphRequest(
            **self._fields, variables=variables, calls=calls, idempotency_key=new_token()
        )
        send = partial(self._calls.semantic_graph, request)
        return await self._when_there_is_room(send)

    async def create_variable(self, name: str, content: str | None) -> str:
        """Returns its id."""
        return await self._calls.create_var(*self._scope, name, content)

    async def set(self, var_id: str, content: str) -> None:
        await self._calls.set_var(*self._scope, var_id, content)

    async def set_again(self, var_id: str, content: str) -> None:
        """Set it, and try again when the connection breaks. Does nothing if it is set already."""
        set_var = partial(self._calls.set_var, *self._scope, var_id, content)
        with suppress(AlreadySet):
            await self._with_retries(set_var)

    async def watch(self, var_id: str, name: str, options: ReadOptions) -> VarGetResponse:
        """Read a variable for a trial."""
        return await self._read(self._watches, var_id, name, options)

    async def read(self, var_id: str, name: str, options: ReadOptions) -> VarGetResponse:
        return await self._read(self._reads, var_id, name, options)

    async def _read(
        self, client: ServeClient, var_id: str, name: str, options: ReadOptions
    ) -> VarGetResponse:
        read = partial(client.read_var, *self._scope, var_id, **options)
        return await self._wait_for(read, f"no value of `{name}`", options)

    async def read_first(
        self, var_ids: Sequence[str], k: int, options: ReadOptions
    ) -> list[VarValue]:
        """The first `k` to be ready, in that order."""
        read = partial(self._reads.first_vars, *self._scope, list(var_ids), k, **options)
        return await self._wait_for(read, f"not {k} of {len(var_ids)} values", options)

    async def stream(
        self,
        var_id: str,
        name: str,
        options: ReadOptions,
        emit: Callable[[str], None],
        on_done: Callable[[VarGetResponse], None],
    ) -> None:
        """Call `emit` with each piece. A broken stream is opened again and goes on where it was."""
        num_emitted = 0

        async def attempt() -> None:
            nonlocal num_emitted
            end = 0
            async for delta in self._reads.stream_var(
                *self._scope, var_id, **options, on_done=on_done
            ):
                end += len(delta)
                if (num_new := end - num_emitted) > 0:
                    num_emitted = end
                    emit(delta[-num_new:])

        await self._wait_for(attempt, f"no value of `{name}`", options)

    async def cancel(self, var_id: str) -> None:
        await self._with_retries(partial(self._calls.cancel_var, *self._scope, var_id))

    async def info(self) -> SessionInfo:
        return await self._with_retries(partial(self._calls.session_info, *self._scope))

    async def _wait_for(
        self, read: Callable[[], Coroutine[Any, Any, T]], failure: str, options: ReadOptions
    ) -> T:
        """The result of a read. Raises `TimedOut` also if the server does not end it in time, and
        `Unavailable` if it hangs."""
        timeout_s = options["timeout_s"]
        if timeout_s is None:
            return await self._when_there_is_room(lambda: self._liveness.guard(read()))
        try:
            async with asyncio.timeout(timeout_s + _READ_MARGIN_S):
                return await self._when_there_is_room(read)
        except TimeoutError:
            raise TimedOut(f"{failure} within {timeout_s} s") from None

    async def _when_there_is_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """A service whose queue is full has room again when it has worked for a while: in as long
        as it says."""
        try:
            return await self._with_retries(attempt)
        except QueueFull as error:
            refusals = [error]
        import stamina

        loop = asyncio.get_running_loop()
        until = loop.time() + _ROOM_TIMEOUT_S

        async def again() -> T:
            if refusals:
                raise refusals.pop()
            return await self._with_retries(attempt)

        return await stamina.AsyncRetryingCaller(
            attempts=None, timeout=_ROOM_TIMEOUT_S, wait_max=_MAX_ROOM_PAUSE_S
        )(lambda error: pause_s(error, until - loop.time()), again)

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The first attempt is made plainly: it is the hot path, and all but always succeeds."""
        try:
            return await attempt()
        except Unavailable as error:
            if not _is_broken_connection(error):
                raise
        import stamina

        return await stamina.AsyncRetryingCaller(**self._retrying)(_is_broken_connection, attempt)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._calls.delete_session(*self._scope)
        except (ParrotError, TimeoutError) as error:
            logger.warning("session %d was not ended at the server: %s", self.session_id, error)
        await self._calls.close()
        await self._reads.close()
        await self._watches.close()


def pause_s(error: Exception, left_s: float) -> bool | float:
    """The seconds until a request that the error has refused may come again: as long as the server
    says, and a little more, so that those refused together do not come together, but no more than
    are left. True: nobody says how long. False: it was not refused for want of room."""
    if not isinstance(error, QueueFull):
        return False
    if error.retry_after_s is None:
        return True
    return max(0.0, min(error.retry_after_s * random.uniform(1.0, 1.2), left_s))


def checked(kind: type[M], subject: str, fields: dict[str, Any]) -> M:
    """The payload with these fields. Raises `ValidationFailed` that names the subject."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise ValidationFailed(f"{subject}: `{param}`: {first['msg']}", param=param) from None


def _is_broken_connection(error: BaseException) -> bool:
    """Whether the connection broke, or was not made. Other subclasses of `Unavailable` are
    answers of the server."""
    return type(error) in (Unavailable, Unreachable)
