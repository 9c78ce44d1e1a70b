"""A program's session at a ServeCore: every exchange of the front end goes through here."""

import asyncio
import atexit
import logging
import queue
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from parrot.frontend.pfunc.background import BackgroundLoop, cancel_others
from parrot.frontend.pfunc.call import BasicCall, PyNativeCall, SemanticCall
from parrot.frontend.pfunc.liveness import LivenessProbe
from parrot.frontend.pfunc.semantic_variable import ReadOptions, SemanticVariable
from parrot.protocol.errors import (
    ParrotError,
    QueueFull,
    SessionGone,
    TimedOut,
    Unavailable,
    ValidationFailed,
)
from parrot.protocol.http import HttpClient
from parrot.protocol.public import (
    CallResponse,
    NativeCallRequest,
    SemanticCallRequest,
    SessionInfo,
    VarGetResponse,
    VarValue,
)
from parrot.protocol.serve_client import ServeClient
from parrot.utils.ids import new_token

if TYPE_CHECKING:
    from parrot.frontend.pfunc.function import SemanticFunction

logger = logging.getLogger("parrot.frontend.pfunc")

T = TypeVar("T")
Producer = Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]
Request = TypeVar("Request", SemanticCallRequest, NativeCallRequest)

_NUM_CALL_CONNECTIONS = 32
_NUM_READ_CONNECTIONS = 512  # each pending read holds one
_NUM_ATTEMPTS = 3
_ROOM_TIMEOUT_S = 60.0
_MAX_ROOM_PAUSE_S = 1.0
_READ_MARGIN_S = 1.0  # the server ends a read at its timeout; after this we do
_CLOSE_TIMEOUT_S = 5.0
_LIVENESS_INTERVAL_S = 30.0


class _End(Enum):
    """Comes after the last item."""

    END = 0


class Session:
    """One session. Its coroutines run on its own background loop: give them to `run`, `arun` or
    `start`.

    Reads, calls and cancellations are tried again when the connection breaks (a call carries an
    idempotency key); making a session or a variable and setting one are not. Calls and reads also
    wait for a full queue to have room again, up to a minute."""

    def __init__(
        self,
        loop: BackgroundLoop,
        calls: ServeClient,
        reads: ServeClient,
        session_id: int,
        session_auth: str,
    ) -> None:
        """Takes ownership of `loop` and both clients. `reads` may be busy for long."""
        self.session_id = session_id
        self.contexts: dict[SemanticFunction, int] = {}
        """The requests whose contexts the next calls continue, by function."""
        self._loop = loop
        self._calls = calls
        self._reads = reads
        self._scope = (session_id, session_auth)
        self._registering = asyncio.Lock()
        self._liveness = LivenessProbe(calls.health, _LIVENESS_INTERVAL_S)
        self._is_closed = False
        atexit.register(self.close)

    @classmethod
    def open(
        cls, core_http_addr: str, api_key: str | None = None, *, on_demand: bool = False
    ) -> "Session":
        """Raises `Unavailable` if nobody answers there, `AuthenticationFailed` for a bad key."""
        loop = BackgroundLoop()
        calls = ServeClient(HttpClient(core_http_addr, max_connections=_NUM_CALL_CONNECTIONS))
        reads = ServeClient(HttpClient(core_http_addr, max_connections=_NUM_READ_CONNECTIONS))
        try:
            created = loop.run(calls.create_session(api_key, on_demand=on_demand))
        except BaseException:
            loop.run(calls.close())
            loop.close()
            raise
        return cls(loop, calls, reads, created.session_id, created.session_auth)

    def close(self) -> None:
        """End the session at the server, and every read that is still pending here. Never raises
        for a server that does not answer: a session that nobody uses expires."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        try:
            self._loop.run(self._delete())
        finally:
            self._loop.close()

    def start(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_closed:
            coro.close()
            raise SessionGone(f"session {self.session_id} has ended")
        return self._loop.start(coro)

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Wait for the result. An interrupt (Ctrl-C) ends the wait at once, and the coroutine."""
        future = self.start(coro)
        try:
            return self.result(future)
        finally:
            future.cancel()

    async def arun(self, coro: Coroutine[Any, Any, T]) -> T:
        """The same for a caller with an event loop. Cancelling the caller cancels the coroutine."""
        future = self.start(coro)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            return self.result(future)

    def result(self, future: Future[T]) -> T:
        """Wait for a future of `start`. Only the end of the session cancels it."""
        try:
            return future.result()
        except CancelledError:
            raise SessionGone(f"session {self.session_id} has ended") from None

    def items(self, produce: Producer[T]) -> Iterator[T]:
        """Yield what the coroutine `produce(emit)` emits on the background loop, as it comes.
        Leaving the loop early cancels the coroutine."""
        emitted: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        future = self.start(produce(emitted.put))
        future.add_done_callback(lambda _: emitted.put(_End.END))
        try:
            while (item := emitted.get()) is not _End.END:
                yield item
            self.result(future)
        finally:
            future.cancel()

    async def aitems(self, produce: Producer[T]) -> AsyncGenerator[T]:
        """The same for a caller with an event loop: close it to cancel at a certain moment."""
        emitted: asyncio.Queue[T | _End] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: T | _End) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed: nobody listens any more
                loop.call_soon_threadsafe(emitted.put_nowait, item)

        future = self.start(produce(put))
        future.add_done_callback(lambda _: put(_End.END))
        try:
            while (item := await emitted.get()) is not _End.END:
                yield item
            self.result(future)
        finally:
            future.cancel()

    async def submit_semantic(
        self, call: SemanticCall, *, successor_of: int | None = None, keep_tail: bool = False
    ) -> int:
        """Returns the request id. The call's variables are registered afterwards. `keep_tail`: a
        successor is to see what follows the last output."""
        await self._register_loose(call)
        payload = call.to_request_payload(self) | {"successor_of": successor_of}
        if keep_tail:
            payload["remove_pure_fill"] = False
        if successor_of is not None:
            payload["system"] = None  # the chat has begun with one, or without
        request = self._checked(SemanticCallRequest, payload)
        return self._accepted(
            call, await self._when_there_is_room(lambda: self._calls.semantic_call(request))
        )

    async def submit_native(self, call: PyNativeCall) -> int:
        await self._register_loose(call)
        request = self._checked(NativeCallRequest, call.to_request_payload(self))
        return self._accepted(
            call, await self._when_there_is_room(lambda: self._calls.native_call(request))
        )

    async def register(self, var: SemanticVariable) -> None:
        var_id = await self._calls.create_var(*self._scope, var.name, var.content)
        var.attach(self, var_id)

    async def set(self, var: SemanticVariable, content: str) -> None:
        assert var.id is not None, var
        await self._calls.set_var(*self._scope, var.id, content)

    async def read(
        self,
        var: SemanticVariable,
        options: ReadOptions,
    ) -> str:
        var_id = var.id
        assert var_id is not None, var

        def get() -> Awaitable[VarGetResponse]:
            read = self._reads.read_var(*self._scope, var_id, **options)
            return self._liveness.guard(read) if options["timeout_s"] is None else read

        async with _time_limit(f"no value of `{var.name}`", options["timeout_s"]):
            value = await self._when_there_is_room(get)
        var.settle(value)
        return value.content

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
        self,
        variables: Sequence[SemanticVariable],
        k: int,
        options: ReadOptions,
    ) -> list[SemanticVariable]:
        """The first `k` to be ready, in that order. All are of this session."""
        by_id = {var.id: var for var in variables if var.id is not None}

        def get() -> Awaitable[list[VarValue]]:
            read = self._reads.first_vars(*self._scope, list(by_id), k, **options)
            return self._liveness.guard(read) if options["timeout_s"] is None else read

        async with _time_limit(f"not {k} of {len(by_id)} values", options["timeout_s"]):
            values = await self._when_there_is_room(get)
        for value in values:
            by_id[value.var_id].settle(value)
        return [by_id[value.var_id] for value in values]

    async def stream(
        self,
        var: SemanticVariable,
        options: ReadOptions,
        emit: Callable[[str], None],
    ) -> None:
        """Call `emit` with each piece. A broken stream is opened again and goes on where it was."""
        var_id = var.id
        assert var_id is not None, var
        text = ""

        async def attempt() -> None:
            nonlocal text
            end = 0
            deltas = self._reads.stream_var(*self._scope, var_id, **options, on_done=var.settle)
            async for delta in deltas:
                end += len(delta)
                if (num_new := end - len(text)) > 0:
                    text += delta[-num_new:]
                    emit(delta[-num_new:])

        async with _time_limit(f"no value of `{var.name}`", options["timeout_s"]):
            await self._when_there_is_room(attempt)

    async def cancel(self, var: SemanticVariable) -> None:
        var_id = var.id
        assert var_id is not None, var
        await self._with_retries(lambda: self._calls.cancel_var(*self._scope, var_id))

    async def info(self) -> SessionInfo:
        return await self._with_retries(lambda: self._calls.session_info(*self._scope))

    async def _register_loose(self, call: BasicCall) -> None:
        """Variables from outside any session become ours when a call first uses them. One call at
        a time, so that two calls never register the same one twice."""
        loose = [
            var
            for param, var in call.given_variables()
            if not var.is_registered and (param.is_output or not var.is_ready)
        ]
        if loose:
            async with self._registering:
                for var in loose:
                    if not var.is_registered:
                        await self.register(var)

    def _checked(self, model: type[Request], payload: dict[str, Any]) -> Request:
        session_id, session_auth = self._scope
        try:
            return model(
                session_id=session_id,
                session_auth=session_auth,
                idempotency_key=new_token(),
                **payload,
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            param = ".".join(str(part) for part in first["loc"])
            raise ValidationFailed(
                f"{payload['func_name']}(): `{param}`: {first['msg']}", param=param
            ) from None

    def _accepted(self, call: BasicCall, response: CallResponse) -> int:
        for info in response.param_info:
            var = call.bindings.get(info.parameter_name)
            if isinstance(var, SemanticVariable) and not var.is_registered:
                var.attach(self, info.var_id)
        logger.debug("session %d: request %d is %s", self.session_id, response.request_id, call)
        return response.request_id

    async def _when_there_is_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """A service whose queue is full has room again when it has worked for a while."""
        try:
            return await self._with_retries(attempt)
        except QueueFull:
            import stamina

        return await stamina.AsyncRetryingCaller(
            attempts=None, timeout=_ROOM_TIMEOUT_S, wait_max=_MAX_ROOM_PAUSE_S
        )(QueueFull, self._with_retries, attempt)

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The first attempt is made plainly: it is the hot path, and all but always succeeds."""
        try:
            return await attempt()
        except Unavailable as error:
            if not _is_broken_connection(error):
                raise
        import stamina

        return await stamina.AsyncRetryingCaller(attempts=_NUM_ATTEMPTS - 1, timeout=None)(
            _is_broken_connection, attempt
        )

    async def _delete(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._calls.delete_session(*self._scope)
        except (ParrotError, TimeoutError) as error:
            logger.warning("session %d was not ended at the server: %s", self.session_id, error)
        await cancel_others()
        await self._calls.close()
        await self._reads.close()


@asynccontextmanager
async def _time_limit(what: str, timeout_s: float | None) -> AsyncIterator[None]:
    """Ends a read whose server does not end it in time."""
    try:
        async with asyncio.timeout(None if timeout_s is None else timeout_s + _READ_MARGIN_S):
            yield
    except TimeoutError:
        raise TimedOut(f"{what} within {timeout_s} s") from None


def _is_broken_connection(error: BaseException) -> bool:
    """Whether the connection broke. Subclasses of `Unavailable` are answers of the server."""
    return type(error) is Unavailable
