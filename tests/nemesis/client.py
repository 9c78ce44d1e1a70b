"""A program with a session: its calls, variables and reads, all recorded."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import count
from typing import Any

from parrot.protocol.errors import AlreadySet, Cancelled, ParrotError, SessionGone
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import (
    CallParameter,
    CallResponse,
    GraphRequest,
    NativeCallRequest,
    SemanticCallRequest,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.serve_client import ServeClient
from tests.nemesis.caller import PAUSE_S, Caller, fields_of
from tests.nemesis.history import (
    Attempt,
    Cancel,
    Close,
    History,
    Read,
    Seen,
    SeenCall,
    SetValue,
    Submit,
    digest_of,
)

READ_S = 4.0  # Timeout of a read, after which it is repeated.
FINAL = frozenset({"done", "failed", "cancelled"})


class Client(Caller):
    """The client of a program, with one session."""

    def __init__(self, program: int, tenant: str, urls: Sequence[str], history: History) -> None:
        super().__init__(program, tenant, urls, history)
        self._serve = ServeClient(self.http)
        self._session_id, self._auth = 0, ""
        self._keys = count()

    # The session

    async def begin(self) -> None:
        answer = await self.persistently(lambda: self._serve.create_session(self._tenant), _ignore)
        self._session_id, self._auth = answer.session_id, answer.session_auth

    async def end(self) -> None:
        """End the session. It may have ended already if the answer to an attempt was lost."""

        def record(asked: Attempt, answer: None) -> None:
            self._history.closes.append(Close(**fields_of(asked)))

        try:
            await self.persistently(
                lambda: self._serve.delete_session(self._session_id, self._auth), record
            )
        except SessionGone:
            pass
        except ParrotError as error:
            if error.status != 404:
                raise

    async def show(self) -> None:
        """Wait until all calls have ended, and record how the service shows them. A call that timed
        out without an engine runs only when it is read again, so this reads all open calls."""
        while True:
            info = await self.persistently(
                lambda: self._serve.session_info(self._session_id, self._auth), _ignore
            )
            open_calls = [call for call in info.calls if call.state not in FINAL]
            if not open_calls:
                break
            for call in open_calls:
                await self.failure(call.output_var_id)
            await asyncio.sleep(PAUSE_S)
        calls = tuple(
            SeenCall(
                outputs=tuple(call.outputs) or (call.output_var_id,),
                state=call.state,
                attempts=call.attempts,
                started_s=call.started_s,
                finished_s=call.finished_s,
            )
            for call in info.calls
        )
        self._history.seen.append(Seen(program=self.program, calls=calls))

    # Calls and variables

    async def call(
        self,
        template: str,
        length: int = 16,
        *,
        inputs: Mapping[str, str] | None = None,
        key: str = "",
        is_secret: bool = False,
        is_sampled: bool = False,
        **options: Any,
    ) -> str:
        """Submit a call with the output `out`, and return the id of the output. `inputs` are ids of
        variables. With `is_secret`, the prompt is recorded. With `is_sampled`, each run of the call
        has a different value."""
        request = SemanticCallRequest(
            session_id=self._session_id,
            session_auth=self._auth,
            template=template + " {{out}}",
            parameters=[*_inputs(inputs), _output(length, 1.0 if is_sampled else 0.0)],
            idempotency_key=key or f"call-{next(self._keys)}",
            **options,
        )
        prompt = template if is_secret else None
        answer = await self._submit(
            request, lambda: self._serve.semantic_call(request), prompt, is_sampled=is_sampled
        )
        return _output_of(answer)

    async def native(
        self, source: str, inputs: Mapping[str, str] | None = None, *, fails: bool = False
    ) -> str:
        """Submit a native function `f` with the output `out`, and return the id of the output."""
        request = NativeCallRequest(
            session_id=self._session_id,
            session_auth=self._auth,
            func_name="f",
            func_source=source,
            parameters=[*_inputs(inputs), CallParameter(name="out", is_output=True)],
            idempotency_key=f"call-{next(self._keys)}",
            timeout=10.0,
        )
        answer = await self._submit(request, lambda: self._serve.native_call(request), fails=fails)
        return _output_of(answer)

    async def _submit(
        self,
        request: SemanticCallRequest | NativeCallRequest,
        ask: Callable[[], Awaitable[CallResponse]],
        prompt: str | None = None,
        *,
        fails: bool = False,
        is_sampled: bool = False,
    ) -> CallResponse:
        inputs = tuple(p.var_id for p in request.parameters if p.var_id is not None)
        key = request.idempotency_key or ""

        def record(asked: Attempt, answer: CallResponse | None) -> None:
            outputs = () if answer is None else (_output_of(answer),)
            self._history.submits.append(
                Submit(
                    **fields_of(asked),
                    key=key,
                    inputs=inputs,
                    outputs=outputs,
                    prompt=prompt,
                    fails=fails,
                    is_sampled=is_sampled,
                )
            )

        return await self.persistently(ask, record)

    async def graph(self, calls: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Submit calls that reference each other by name. Returns the variable ids by name."""
        request = GraphRequest(
            session_id=self._session_id,
            session_auth=self._auth,
            calls=list(calls),
            idempotency_key=f"call-{next(self._keys)}",
        )
        answer = await self.persistently(lambda: self._serve.semantic_graph(request), _ignore)
        for number, call in enumerate(answer.calls):
            outputs = tuple(p.var_id for p in call.param_info if p.is_output)
            inputs = tuple(p.var_id for p in call.param_info if not p.is_output)
            asked = Attempt(program=self.program, invoked=time.monotonic())
            key = f"{request.idempotency_key}.{number}"
            self._history.submits.append(
                Submit(**fields_of(asked), key=key, inputs=inputs, outputs=outputs)
            )
        return answer.variables

    async def variable(self, name: str) -> str:
        """Create a variable. If an answer is lost, the first variable remains unused."""
        return await self.persistently(
            lambda: self._serve.create_var(self._session_id, self._auth, name), _ignore
        )

    async def set(self, var: str, text: str) -> None:
        def record(asked: Attempt, answer: None) -> None:
            value = SetValue(**fields_of(asked), var=var, digest=digest_of(text))
            self._history.sets.append(value)

        try:
            await self.persistently(
                lambda: self._serve.set_var(self._session_id, self._auth, var, text), record
            )
        except AlreadySet:
            if await self.get(var) != text:
                raise

    async def read_set_values(self) -> None:
        """Read once each value that this program has set. If the program hangs, a lost value may be
        the cause."""
        own = [s.var for s in self._history.sets if s.program == self.program and s.is_acknowledged]
        for var in dict.fromkeys(own):
            with suppress(ParrotError):
                await self.get(var, is_once=True)

    async def cancel(self, var: str) -> None:
        def record(asked: Attempt, answer: None) -> None:
            self._history.cancels.append(Cancel(**fields_of(asked), var=var))

        await self.persistently(
            lambda: self._serve.cancel_var(self._session_id, self._auth, var), record
        )

    # Reads

    async def get(self, var: str, *, is_once: bool = False) -> str:
        """Return the value of a variable. Raises its error."""

        def record(asked: Attempt, answer: Any) -> None:
            text = None if answer is None else answer.content
            usage = None if answer is None else answer.usage
            self._read(asked, var, text, cached=None if usage is None else usage.cached_tokens)

        async def ask() -> Any:
            return await self._serve.read_var(
                self._session_id,
                self._auth,
                var,
                criteria=PerformanceCriteria.LATENCY,
                timeout_s=READ_S,
            )

        return str((await self.persistently(ask, record, is_once=is_once)).content)

    async def stream(self, var: str, max_pieces: int | None = None) -> str:
        """Stream the value of a variable. Stops after `max_pieces` and returns the text so far."""
        pieces: list[str] = []

        def record(asked: Attempt, text: str | None) -> None:
            is_whole = text is not None and max_pieces is None
            self._read(asked, var, text if is_whole else None, tuple(pieces))

        async def ask() -> str:
            pieces.clear()
            deltas: AsyncGenerator[str] = self._serve.stream_var(  # type: ignore[assignment]
                self._session_id, self._auth, var, timeout_s=READ_S
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    pieces.append(delta)
                    if len(pieces) == max_pieces:
                        break
            return "".join(pieces)

        return await self.persistently(ask, record)

    async def failure(self, var: str) -> str:
        """Return the type of the variable's error, or `ready` if it has a value."""
        try:
            await self.get(var)
        except ParrotError as error:
            return error.type
        return "ready"

    async def first(self, candidates: Sequence[str]) -> str:
        """Return the variable that is ready first, and record its value."""
        answer = await self.persistently(
            lambda: self._serve.first_vars(
                self._session_id, self._auth, candidates, timeout_s=READ_S
            ),
            _ignore,
        )
        asked = Attempt(program=self.program, invoked=time.monotonic(), answered=time.monotonic())
        self._read(asked, answer[0].var_id, answer[0].content)
        return answer[0].var_id

    def _read(
        self,
        asked: Attempt,
        var: str,
        text: str | None,
        pieces: tuple[str, ...] | None = None,
        cached: int | None = None,
    ) -> None:
        error = asked.error
        if error == Cancelled.type and asked.answered is None:
            error = ""
        fields = fields_of(asked) | {"error": error}
        self._history.reads.append(
            Read(**fields, var=var, limit_s=READ_S, text=text, pieces=pieces, cached_tokens=cached)
        )


def _ignore(asked: Attempt, answer: Any) -> None:
    """Records nothing, for requests that no promise is about."""


def _inputs(inputs: Mapping[str, str] | None) -> list[CallParameter]:
    return [CallParameter(name=name, var_id=var) for name, var in (inputs or {}).items()]


def _output(length: int, temperature: float) -> CallParameter:
    sampling = SamplingConfig(
        temperature=temperature, max_gen_length=length, ignore_tokenizer_eos=True
    )
    return CallParameter(name="out", is_output=True, sampling_config=sampling)


def _output_of(answer: CallResponse) -> str:
    return next(p.var_id for p in answer.param_info if p.is_output)
