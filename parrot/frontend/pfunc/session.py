"""A program's session at a ServeCore: every exchange of the front end goes through here."""

import asyncio
import atexit
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from parrot.frontend.pfunc.background import BackgroundLoop
from parrot.frontend.pfunc.call import BasicCall, SemanticCall
from parrot.frontend.pfunc.semantic_variable import ReadOptions, SemanticVariable
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
)
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.transport import Unreachable
from parrot.utils.ids import new_token
from parrot.utils.traceparent import current_traceparent

if TYPE_CHECKING:
    from parrot.frontend.pfunc.function import SemanticFunction

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
        self.contexts: dict[SemanticFunction, int] = {}
        """The requests whose contexts the next calls continue, by function."""
        urls = core_http_addr.split(",")
        self._calls = ServeClient(client_of(urls, max_connections=_NUM_CALL_CONNECTIONS))
        self._reads = ServeClient(client_of(urls, max_connections=_NUM_READ_CONNECTIONS))
        self._watches = ServeClient(client_of(urls, max_connections=_NUM_TRIALS))
        # Reads of trials wait for no others: in this order, each needs only those before it.
        self._trial_slots = asyncio.Semaphore(_NUM_TRIALS)
        self._registering = asyncio.Lock()
        # Behind a first attempt whose connection broke.
        self._retrying: dict[str, Any] = {"attempts": _NUM_ATTEMPTS - 1, "timeout": None}
        if restart_timeout_s is not None:
            self._retrying = {"attempts": None, "timeout": restart_timeout_s, "wait_max": 1.0}
        self._trials: dict[SemanticVariable, asyncio.Task[None]] = {}  # by what they are to set
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

    async def submit(self, call: BasicCall, overrides: dict[str, Any]) -> int:
        """Returns the request id. The call's variables are registered afterwards. `overrides` are
        fields of the request that its function alone does not know."""
        await self._register_loose(call)
        payload = call.to_request_payload(self) | overrides
        payload |= {**self._fields, "idempotency_key": new_token()}
        kind: type[SemanticCallRequest | NativeCallRequest] = NativeCallRequest
        send: Callable[[Any], Awaitable[CallResponse]] = self._calls.native_call
        if isinstance(call, SemanticCall):
            kind, send = SemanticCallRequest, self._calls.semantic_call
        request = checked(kind, f"{call.func.name}()", payload)
        response = await self._when_there_is_room(partial(send, request))
        call.request_id = response.request_id
        for info in response.param_info:
            var = call.bindings.get(info.parameter_name)
            if isinstance(var, SemanticVariable) and not var.is_registered:
                var.attach(self, info.var_id)
        logger.debug("session %d: request %d is %s", self.session_id, response.request_id, call)
        return response.request_id

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

    async def register(self, var: SemanticVariable) -> None:
        var_id = await self._calls.create_var(*self._scope, var.name, var.content)
        var.attach(self, var_id)

    async def set(self, var: SemanticVariable, content: str) -> None:
        await self._calls.set_var(*self._scope, await _id_of(var), content)

    async def set_again(self, var: SemanticVariable, content: str) -> None:
        """Set it, and try again when the connection breaks. Does nothing if it is set already."""
        set_var = partial(self._calls.set_var, *self._scope, await _id_of(var), content)
        with suppress(AlreadySet):
            await self._with_retries(set_var)

    def supervise(
        self, variables: Sequence[SemanticVariable], work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run what is to set the variables. If it fails, or one of them is cancelled, all are."""
        task = asyncio.ensure_future(self._supervised(variables, work))
        self._trials |= dict.fromkeys(variables, task)
        task.add_done_callback(lambda _: [self._trials.pop(var, None) for var in variables])

    async def _supervised(
        self, variables: Sequence[SemanticVariable], work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            async with self._trial_slots:
                await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            names = ", ".join(var.name for var in variables)
            logger.warning("the attempts to make %s ended: %s", names, error)
            for var in variables:
                with suppress(ParrotError):
                    await self._cancel(var)

    async def watch(self, var: SemanticVariable, options: ReadOptions) -> None:
        """Read it for a trial."""
        await self._read(self._watches, var, options)

    async def read(self, var: SemanticVariable, options: ReadOptions) -> None:
        await self._read(self._reads, var, options)

    async def _read(self, client: ServeClient, var: SemanticVariable, options: ReadOptions) -> None:
        read = partial(client.read_var, *self._scope, await _id_of(var), **options)
        value = await self._wait_for(read, f"no value of `{var.name}`", options)
        var.settle(value)

    async def read_each(
        self,
        variables: Sequence[SemanticVariable],
        options: ReadOptions,
        emit: Callable[[tuple[SemanticVariable, ParrotError | None]], None],
    ) -> None:
        """Read all at once, and emit each as soon as it is ready or failed (with its error)."""

        async def read(var: SemanticVariable) -> None:
            try:
                await self.read(var, options)
            except ParrotError as error:
                emit((var, error))
            else:
                emit((var, None))

        async with asyncio.TaskGroup() as group:
            for var in variables:
                group.create_task(read(var))

    async def read_first(
        self, variables: Sequence[SemanticVariable], k: int, options: ReadOptions
    ) -> list[SemanticVariable]:
        """The first `k` to be ready, in that order. All are of this session."""
        by_id = {await _id_of(var): var for var in variables}
        read = partial(self._reads.first_vars, *self._scope, list(by_id), k, **options)
        values = await self._wait_for(read, f"not {k} of {len(by_id)} values", options)
        for value in values:
            by_id[value.var_id].settle(value)
        return [by_id[value.var_id] for value in values]

    async def stream(
        self, var: SemanticVariable, options: ReadOptions, emit: Callable[[str], None]
    ) -> None:
        """Call `emit` with each piece. A broken stream is opened again and goes on where it was."""
        var_id = await _id_of(var)
        num_emitted = 0

        async def attempt() -> None:
            nonlocal num_emitted
            end = 0
            async for delta in self._reads.stream_var(
                *self._scope, var_id, **options, on_done=var.settle
            ):
                end += len(delta)
                if (num_new := end - num_emitted) > 0:
                    num_emitted = end
                    emit(delta[-num_new:])

        await self._wait_for(attempt, f"no value of `{var.name}`", options)

    async def cancel(self, var: SemanticVariable) -> None:
        trial = self._trials.get(var)
        if trial is None:
            await self._cancel(var)
            return
        for other in [one for one, of in self._trials.items() if of is trial]:
            await self._cancel(other)
        trial.cancel()

    async def _cancel(self, var: SemanticVariable) -> None:
        cancel = partial(self._calls.cancel_var, *self._scope, await _id_of(var))
        await self._with_retries(cancel)

    async def info(self) -> SessionInfo:
        return await self._with_retries(partial(self._calls.session_info, *self._scope))

    async def _register_loose(self, call: BasicCall) -> None:
        """Variables from outside any session become ours when a call first uses them. One call at
        a time, so that two calls never register the same one twice."""
        loose = call.loose_variables()
        if loose:
            async with self._registering:
                for var in loose:
                    if var.draft is not None:
                        await var.draft.send()
                    elif not var.is_registered:
                        await self.register(var)

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


async def _id_of(var: SemanticVariable) -> str:
    """Its id, for which what it was drafted with is sent."""
    if var.draft is not None:
        await var.draft.send()
    return var.registered_id


def _is_broken_connection(error: BaseException) -> bool:
    """Whether the connection broke, or was not made. Other subclasses of `Unavailable` are
    answers of the server."""
    return type(error) in (Unavailable, Unreachable)
