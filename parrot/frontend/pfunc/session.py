"""A program's session with a ServeCore. The front end sends all requests through it."""

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
from parrot.protocol.limited import LimitedTransport
from parrot.protocol.program_client import ProgramClient
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

_NUM_CALLS = 32  # Concurrent requests other than reads. Each needs one connection.
_NUM_READS = 512  # Concurrent reads. Each needs one connection.
_NUM_TRIALS = 256  # Trials that run concurrently. Each needs one connection.
_NUM_ATTEMPTS = 3  # Attempts of a request whose connection breaks.
_FULL_TIMEOUT_S = 60.0  # Seconds for which a request is retried while ServeCore's queue is full.
_MAX_FULL_PAUSE_S = 1.0  # Longest pause between these retries, in seconds.
_READ_MARGIN_S = 1.0  # Seconds after a read's timeout until the client ends the read itself.
_CLOSE_TIMEOUT_S = 5.0  # Seconds to end the session at the server.
_LIVENESS_INTERVAL_S = 30.0  # Seconds between health probes while reads are pending.
_START_HINT = (
    "Start a ServeCore there (`parrot up embedded`), or pass P.VirtualMachine the address of one"
)


class Session:
    """One session. Its coroutines run on its own `loop`.

    Reads, calls and cancellations are retried when the connection breaks. Calls have an idempotency
    key for this. The creation of sessions and variables, and setting variables, are not retried.
    While ServeCore's queue is full, calls and reads are retried for up to 60 s."""

    def __init__(
        self,
        core_http_addr: str,
        api_key: str | None = None,
        *,
        on_demand: bool = False,
        app: str | None = None,
        restart_timeout_s: float | None = None,
    ) -> None:
        """Raises `Unavailable` if no server answers, and `AuthenticationFailed` for a wrong key."""
        # The first read uses the connection of the calls before it, which saves a round trip.
        server = client_of(core_http_addr.split(","), ProgramClient)
        self.loop = BackgroundLoop()
        self.contexts: dict[Hashable, int] = {}
        """Kept contexts: the request_id whose context the next call of a function continues."""
        self._calls = ServeClient(LimitedTransport(server, _NUM_CALLS))
        self._reads = ServeClient(LimitedTransport(server, _NUM_READS))
        self._watches = ServeClient(server)  # `trial_slots` limits them.
        # Trials get slots in the order of submission, and a trial depends only on earlier ones. So
        # a waiting trial never blocks a running one.
        self.trial_slots = asyncio.Semaphore(_NUM_TRIALS)
        self.trials: set[asyncio.Task[None]] = set()
        self.registering = asyncio.Lock()
        """Held while variables are registered, so that two calls never register the same one."""
        # For the attempts after a first attempt whose connection broke.
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
                raise Unavailable(f"{error.message}. {_START_HINT}") from None
            raise
        self.session_id = created.session_id
        self._fields = created.model_dump()
        self._scope = (created.session_id, created.session_auth)
        atexit.register(self.close)

    def close(self) -> None:
        """End the session at the server and cancel all pending reads. Does not raise if the server
        does not answer: it removes unused sessions after some time."""
        atexit.unregister(self.close)
        self.loop.close(self._leave)

    async def semantic_call(self, subject: str, payload: dict[str, Any]) -> CallResponse:
        """Submit a semantic call. `subject` begins the error message for an invalid payload."""
        request = checked(SemanticCallRequest, subject, self._completed(payload))
        return await self._retry_while_full(partial(self._calls.semantic_call, request))

    async def native_call(self, subject: str, payload: dict[str, Any]) -> CallResponse:
        request = checked(NativeCallRequest, subject, self._completed(payload))
        return await self._retry_while_full(partial(self._calls.native_call, request))

    def _completed(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload | self._fields | {"idempotency_key": new_token()}

    async def submit_graph(
        self,
        variables: list[GraphVariable],
        calls: list[SemanticGraphCall | NativeGraphCall],
    ) -> GraphResponse:
        """Submit variables and calls in one request, which succeeds or fails as a whole."""
        request = GraphRequest(
            **self._fields, variables=variables, calls=calls, idempotency_key=new_token()
        )
        send = partial(self._calls.semantic_graph, request)
        return await self._retry_while_full(send)

    async def create_variable(self, name: str, content: str | None) -> str:
        """Create a variable and return its id."""
        return await self._calls.create_var(*self._scope, name, content)

    async def set(self, var_id: str, content: str) -> None:
        await self._calls.set_var(*self._scope, var_id, content)

    async def set_again(self, var_id: str, content: str) -> None:
        """Set a variable, with retries when the connection breaks. No effect if it is already
        set."""
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
        """The values of the first `k` ready variables, in order."""
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
        """Call `emit` with each chunk. A broken stream is opened again and continues where it
        broke."""
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
        """The result of a read. Raises `TimedOut` if the server does not end the read within its
        timeout, and `Unavailable` if the server hangs."""
        timeout_s = options["timeout_s"]
        if timeout_s is None:
            return await self._retry_while_full(lambda: self._liveness.guard(read()))
        try:
            async with asyncio.timeout(timeout_s + _READ_MARGIN_S):
                return await self._retry_while_full(read)
        except TimeoutError:
            raise TimedOut(f"{failure} within {timeout_s} s") from None

    async def _retry_while_full(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run `attempt`, and retry it for up to 60 s while ServeCore's queue is full. The server
        suggests the pauses."""
        try:
            return await self._with_retries(attempt)
        except QueueFull as error:
            refusals = [error]
        import stamina

        loop = asyncio.get_running_loop()
        until = loop.time() + _FULL_TIMEOUT_S

        async def again() -> T:
            if refusals:
                raise refusals.pop()
            return await self._with_retries(attempt)

        return await stamina.AsyncRetryingCaller(
            attempts=None, timeout=_FULL_TIMEOUT_S, wait_max=_MAX_FULL_PAUSE_S
        )(lambda error: pause_s(error, until - loop.time()), again)

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run `attempt` and retry it when the connection breaks. The first attempt runs without the
        retry library, because nearly all attempts succeed."""
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


def pause_s(error: Exception, left_s: float) -> bool | float:
    """Seconds to wait before a rejected request is retried: the server's `Retry-After` plus up to
    20% at random, so that clients do not retry together, and at most `left_s`. True: retry after
    the default pause. False: do not retry, because the error is not a full queue."""
    if not isinstance(error, QueueFull):
        return False
    if error.retry_after_s is None:
        return True
    return max(0.0, min(error.retry_after_s * random.uniform(1.0, 1.2), left_s))


def checked(kind: type[M], subject: str, fields: dict[str, Any]) -> M:
    """The validated payload. Raises `ValidationFailed` with the subject and the invalid field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise ValidationFailed(f"{subject}: `{param}`: {first['msg']}", param=param) from None


def _is_broken_connection(error: BaseException) -> bool:
    """Whether the connection failed or broke. Other subclasses of `Unavailable` are answers of the
    server."""
    return type(error) in (Unavailable, Unreachable)
