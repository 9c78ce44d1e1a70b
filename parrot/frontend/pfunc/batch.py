"""Batches: all calls of a block go to ServeCore in one request.

with vm.batch():                       draft: v0 = summarize(...)    nothing is sent
    parts = [summarize(t) for t in ts]        v1 = summarize(...)
    end = combine(parts)                      v2 = combine(v0, v1)
                                       one request; v0, v1, v2 get their ids
"""

import re
from contextvars import ContextVar, Token
from typing import Any

from parrot.frontend.pfunc.call import BasicCall, SemanticCall
from parrot.frontend.pfunc.pending_request import PendingRequest
from parrot.frontend.pfunc.semantic_variable import SemanticVariable, current_session
from parrot.frontend.pfunc.session import Session, checked
from parrot.protocol.errors import Cancelled, ParrotError
from parrot.protocol.public import (
    MAX_BINDINGS,
    MAX_BRACES,
    MAX_CALLS,
    MAX_PARAMETERS,
    MAX_VARIABLES,
    GraphVariable,
    NativeGraphCall,
    SemanticGraphCall,
)

_MAX_CHARS = 4 * 2**20  # Characters of a draft's texts above which the draft is sent.
_CALL_FIELD = re.compile(r"calls\.(\d+)(?:\.(.*))?")


class Batch:
    """Sends all calls and new variables of a block at its end, in one request. A block with more
    than 512 calls or 4 million characters is sent in several requests. Each request succeeds or
    fails as a whole.

    The pending part is sent earlier if the program reads, sets or cancels a variable of the block,
    passes one to a call outside the block, or continues a kept context. Leaving the block raises
    the error of a request. After an exception in the block, unsent calls are dropped. An inner
    batch is part of the outer batch."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_open = False
        self._draft = Draft(session)
        self._tokens: tuple[Token[Session | None], Token[Batch | None]] | None = None

    def __enter__(self) -> None:
        if batch_of(self.session) is None:
            self.is_open = True
            self._tokens = (
                current_session.of_context.set(self.session),
                current_batch.set(self),
            )

    async def __aenter__(self) -> None:
        self.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        if self._leave():
            self.session.loop.run(self.send() if kind is None else self._drop(kind))

    async def __aexit__(self, kind: type[BaseException] | None, *about: object) -> None:
        if self._leave():
            await self.session.loop.arun(self.send() if kind is None else self._drop(kind))

    # On the session's loop

    async def add(self, call: BasicCall) -> None:
        draft = await self._open_draft(call)
        draft.add(call)
        if draft.is_full:
            await draft.request.send()

    async def declare(self, var: SemanticVariable) -> None:
        draft = await self._open_draft()
        draft.declare(var)
        if draft.is_full:
            await draft.request.send()

    async def send(self) -> None:
        """Send the pending part now. Raises the error of the request."""
        await self._draft.request.send()

    async def _open_draft(self, call: BasicCall | None = None) -> "Draft":
        """The draft for the next call. First sends other drafts that contain variables of the
        call."""
        given = [] if call is None else [var for _, var in call.given_variables()]
        while True:
            if not self._draft.request.is_open:
                self._draft = Draft(self.session)
            others = {var.draft for var in given if var.draft not in (None, self._draft.request)}
            if not others:
                return self._draft
            for other in others:
                assert other is not None
                await other.send()

    async def _drop(self, kind: type[BaseException]) -> None:
        self._draft.request.drop(Cancelled(f"a {kind.__name__} ended the batch before it was sent"))

    def _leave(self) -> bool:
        """Close the batch. False if it is part of an outer batch."""
        if self._tokens is None:
            return False
        session, batch = self._tokens
        current_batch.reset(batch)
        current_session.of_context.reset(session)
        self._tokens = None
        self.is_open = False
        return True


class Draft:
    """Calls and new variables that are sent in one request. Use it only on the session's loop. Each
    variable refers to its draft until the variable has an id."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names: dict[SemanticVariable, str] = {}  # Names in the request.
        self._variables: list[GraphVariable] = []
        self._calls: list[SemanticGraphCall | NativeGraphCall] = []
        self._functions: list[BasicCall] = []
        self._num_bindings = 0
        self._num_chars = 0
        self._num_braces = 0
        self.request = PendingRequest(self._post)

    @property
    def is_full(self) -> bool:
        """Whether another call could exceed the limits of one request."""
        return (
            len(self._calls) >= MAX_CALLS
            or self._num_bindings > MAX_BINDINGS - MAX_PARAMETERS
            or len(self._variables) > MAX_VARIABLES - MAX_PARAMETERS
            or self._num_chars > _MAX_CHARS
            or self._num_braces > MAX_BRACES // 2
        )

    def declare(self, var: SemanticVariable) -> None:
        """Add a new variable. Raises `ValidationFailed`."""
        name = self._new_name()
        fields = {"name": name, "var_name": var.name, "content": var.content}
        self._variables.append(checked(GraphVariable, "P.variable()", fields))
        self._num_chars += len(var.content or "")
        self._enter(var, name)

    def add(self, call: BasicCall) -> None:
        """Add a call. Raises `ValidationFailed`, and `InvalidRequest` for variables of other
        sessions."""
        for var in call.unregistered_variables():
            if var.draft is None and var.session is None:
                self.declare(var)
        outputs = {var: self._new_name(i) for i, var in enumerate(call.new_variables())}
        self._names |= outputs
        try:
            payload = call.to_request_payload(self._session, self._names)
            graph_call = _graph_call(call, payload)
        except ParrotError:
            for output in outputs:
                del self._names[output]
            raise
        for output, name in outputs.items():
            self._enter(output, name)
        self._calls.append(graph_call)
        self._functions.append(call)
        self._num_bindings += len(graph_call.parameters)
        self._num_chars += sum(len(given.value or "") for given in graph_call.parameters)
        self._num_braces += payload.get("template", "").count("{{")
        self._num_chars += len(payload.get("template", "")) + len(payload.get("system") or "")

    async def _post(self) -> None:
        if not self._names and not self._calls:
            return
        try:
            answer = await self._session.submit_graph(self._variables, self._calls)
        except ParrotError as error:
            raise self._named(error) from error.__cause__
        for var, name in self._names.items():
            var.attach(self._session, answer.variables[name])
        for call, response in zip(self._functions, answer.calls, strict=True):
            call.request_id = response.request_id

    def _named(self, error: ParrotError) -> ParrotError:
        """The error with the function's name instead of the call's index in the request."""
        field = _CALL_FIELD.fullmatch(error.param or "")
        if field is None:
            return error
        name = self._functions[int(field[1])].func.name
        message = error.message.removeprefix(f"call {field[1]} (`{name}`): ")
        return type(error)(f"{name}(): {message}", param=field[2])

    def _new_name(self, offset: int = 0) -> str:
        return f"v{len(self._names) + offset}"

    def _enter(self, var: SemanticVariable, name: str) -> None:
        self._names[var] = name
        var.attach(self._session, self.request)


current_batch: ContextVar[Batch | None] = ContextVar("parrot_batch", default=None)


def batch_of(session: Session) -> Batch | None:
    """The open batch of this context for the session. None: calls are sent at once."""
    batch = current_batch.get()
    return batch if batch is not None and batch.is_open and batch.session is session else None


def _graph_call(call: BasicCall, payload: dict[str, Any]) -> SemanticGraphCall | NativeGraphCall:
    subject = f"{call.func.name}()"
    if isinstance(call, SemanticCall):
        return checked(SemanticGraphCall, subject, payload)
    return checked(NativeGraphCall, subject, payload)
