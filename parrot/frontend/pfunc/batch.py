"""Batches: what a program submits in a block goes to ServeCore in one request.

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

_MAX_CHARS = 4 * 2**20  # of a draft's texts, before its last call
_CALL_FIELD = re.compile(r"calls\.(\d+)(?:\.(.*))?")


class Batch:
    """Sends all that is called and made in the block at its end, in one request or, if it is more
    than 512 calls or some megabytes, in several: each is submitted whole or not at all. What needs
    the id of a variable of the block (to read, set or cancel it, or to call something outside with
    it) and what goes on with a kept context sends first what there is.

    The end raises the error of a request. An exception of the block passes through, and what was
    not sent by then is dropped. A batch in another one is part of that."""

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
        """Send what there is now. Raises what the request raises."""
        await self._draft.request.send()

    async def _open_draft(self, call: BasicCall | None = None) -> "Draft":
        """The draft to add to, once the call's variables that are in other drafts have ids."""
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
        """Close it, unless it is part of another."""
        if self._tokens is None:
            return False
        session, batch = self._tokens
        current_batch.reset(batch)
        current_session.of_context.reset(session)
        self._tokens = None
        self.is_open = False
        return True


class Draft:
    """Calls and new variables that are sent together, once. Only on the session's loop. The
    variables know it until they have ids."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names: dict[SemanticVariable, str] = {}  # in the request
        self._variables: list[GraphVariable] = []
        self._calls: list[SemanticGraphCall | NativeGraphCall] = []
        self._functions: list[BasicCall] = []
        self._num_bindings = 0
        self._num_chars = 0
        self._num_braces = 0
        self.request = PendingRequest(self._post)

    @property
    def is_full(self) -> bool:
        """Whether another call might be too much for one request."""
        return (
            len(self._calls) >= MAX_CALLS
            or self._num_bindings > MAX_BINDINGS - MAX_PARAMETERS
            or len(self._variables) > MAX_VARIABLES - MAX_PARAMETERS
            or self._num_chars > _MAX_CHARS
            or self._num_braces > MAX_BRACES // 2
        )

    def declare(self, var: SemanticVariable) -> None:
        """Raises `ValidationFailed`."""
        name = self._new_name()
        fields = {"name": name, "var_name": var.name, "content": var.content}
        self._variables.append(checked(GraphVariable, "P.variable()", fields))
        self._num_chars += len(var.content or "")
        self._enter(var, name)

    def add(self, call: BasicCall) -> None:
        """Raises `ValidationFailed`, and `InvalidRequest` for variables of other sessions."""
        for var in call.loose_variables():
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
        """The same error, which names the function instead of the call's place in the request."""
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
    """The batch that calls to the session go to here; None: they are sent at once."""
    batch = current_batch.get()
    return batch if batch is not None and batch.is_open and batch.session is session else None


def _graph_call(call: BasicCall, payload: dict[str, Any]) -> SemanticGraphCall | NativeGraphCall:
    subject = f"{call.func.name}()"
    if isinstance(call, SemanticCall):
        return checked(SemanticGraphCall, subject, payload)
    return checked(NativeGraphCall, subject, payload)
