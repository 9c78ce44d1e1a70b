"""Functions of the front end: prompts (`SemanticFunction`) and code (`PyNativeFunction`)."""

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, cast

from typing_extensions import ParamSpec, TypeVar

from parrot.frontend.pfunc.attempts import Attempts
from parrot.frontend.pfunc.call import BasicCall, PyNativeCall, SemanticCall
from parrot.frontend.pfunc.definitions import NativeDefinition, SemanticDefinition
from parrot.frontend.pfunc.function_body import (
    Constant,
    FuncBodyPiece,
    Parameter,
    ParameterLoc,
    ParamType,
    Signature,
)
from parrot.frontend.pfunc.metadata import SemanticFuncMetadata, parse_metadata
from parrot.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from parrot.frontend.pfunc.batch import Batch
    from parrot.frontend.pfunc.session import Session

Given = ParamSpec("Given", default=...)
"""The parameters of a call, for type checkers."""
Result = TypeVar("Result", covariant=True, default=Any)
"""The result of a call: a variable, or a tuple of them."""

__all__ = [
    "BasicCall",
    "BasicFunction",
    "Constant",
    "FuncBodyPiece",
    "ParamType",
    "Parameter",
    "ParameterLoc",
    "PyNativeCall",
    "PyNativeFunction",
    "SemanticCall",
    "SemanticFunction",
]


class BasicFunction(Signature, Generic[Given, Result]):
    """Calling it submits a call to the current session and returns its output variables, without
    waiting for their values. Outside a session the call itself is returned.

    Positional arguments are the inputs in order; keywords may also give variables to outputs."""

    call_type: ClassVar[type[BasicCall]]

    def __call__(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self.invoke(*args, **kwargs)

    def invoke(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Submit a call and return its outputs. Waits until ServeCore has accepted the call, but
        not until the call has run."""
        call = self.call_type(self, args, kwargs)
        session = call.session
        if session is None:
            return cast("Result", call)
        return session.loop.run(self._submit(session, call, _batch_of(session)))

    async def ainvoke(self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """`invoke` for async code: the event loop continues while the call is submitted."""
        call = self.call_type(self, args, kwargs)
        session = call.session
        if session is None:
            return cast("Result", call)
        return await session.loop.arun(self._submit(session, call, _batch_of(session)))

    async def _submit(self, session: "Session", call: BasicCall, batch: "Batch | None") -> Result:
        if batch is None:
            await call.submit(session, {})
        else:
            await batch.add(call)
        return cast("Result", call.returned)


class SemanticFunction(BasicFunction[Given, Result], SemanticDefinition):
    """A prompt template with inputs and outputs."""

    call_type = SemanticCall

    def __init__(
        self,
        name: str,
        params: Sequence[Parameter],
        func_body_str: str,
        try_register: bool = True,
        **metadata: Any,
    ) -> None:
        """`try_register` has no effect: functions need no registration. Raises `ValueError` for a
        template that cannot work and `TypeError` for unknown metadata."""
        parsed = parse_metadata(SemanticFuncMetadata, metadata)
        super().__init__(name, params, func_body_str, parsed)

    def with_options(
        self,
        *,
        retries: int | None = None,
        feed_back: bool | None = None,
        fallback: BasicFunction[..., Any] | None = None,
        attempt_timeout: float | None = None,
        **metadata: Any,
    ) -> Self:
        """A copy of the function with other options of `@P.semantic_function`. None keeps an
        option. `f.with_options(retries=2)(...)` changes the options of one call."""
        if "remove_pure_fill" in metadata:
            raise TypeError("`remove_pure_fill` can be set only in the definition of a function")
        parsed = parse_metadata(SemanticFuncMetadata, metadata)
        new = self.with_metadata(**{name: getattr(parsed, name) for name in metadata})
        old = self.attempts
        new.attempts = Attempts(
            old.retries if retries is None else retries,
            old.feed_back if feed_back is None else feed_back,
            fallback or old.fallback,
            old.timeout if attempt_timeout is None else attempt_timeout,
        )
        new.attempts.check(new)
        return new

    def invoke_statefully(
        self, /, context_successor: "SemanticFunction", *args: Any, **kwargs: Any
    ) -> Result:
        """Submit a call and keep its context (prompt and outputs). The next call of
        `context_successor` in this session continues the context: its prompt follows directly.

        The kept context includes text after the last output. Both `invoke` and `invoke_statefully`
        continue a context that was kept for the function. Only `invoke_statefully` keeps a new
        one."""
        session, submitting = self._stateful(SemanticCall(self, args, kwargs), context_successor)
        return session.loop.run(submitting)

    async def ainvoke_statefully(
        self, /, context_successor: "SemanticFunction", *args: Any, **kwargs: Any
    ) -> Result:
        """`invoke_statefully` for async code."""
        session, submitting = self._stateful(SemanticCall(self, args, kwargs), context_successor)
        return await session.loop.arun(submitting)

    def _stateful(
        self, call: SemanticCall, successor: object
    ) -> "tuple[Session, Coroutine[Any, Any, Result]]":
        if not isinstance(successor, SemanticFunction):
            raise TypeError("context_successor must be a semantic function")
        session = call.session
        if session is None:
            raise InvalidRequest("stateful calls need a session: use them in vm.running_scope()")
        return session, self._submit(session, call, _batch_of(session), successor)

    async def _submit(
        self,
        session: "Session",
        call: BasicCall,
        batch: "Batch | None",
        successor: "SemanticFunction | None" = None,
    ) -> Result:
        """Submit the call. A kept context is consumed only if the call is accepted. A call that
        continues or keeps a context is sent at once, after the pending part of the batch."""
        if successor is None and not self.outputs:
            raise InvalidRequest(f"`{self.name}` has no output: call it with invoke_statefully")
        if self.attempts.are_many:
            if successor is not None or self in session.contexts:
                raise InvalidRequest(
                    f"`{self.name}` has retries or a fallback, so it cannot be called statefully"
                )
            from parrot.frontend.pfunc.trials import submit_trial

            await submit_trial(session, cast("SemanticCall", call), batch)
            return cast("Result", call.returned)
        if successor is None and self not in session.contexts:
            return await super()._submit(session, call, batch)
        predecessor = session.contexts.pop(self, None)
        overrides: dict[str, Any] = {}
        if successor is not None:  # The successor needs the text after the last output.
            overrides["remove_pure_fill"] = False
        if predecessor is not None:  # Only the first call of a chat sets the system message.
            overrides |= {"successor_of": predecessor, "system": None}
        try:
            if batch is not None:
                await batch.send()
            request_id = await call.submit(session, overrides)
        except BaseException:
            if predecessor is not None:
                session.contexts.setdefault(self, predecessor)
            raise
        if successor is not None:
            session.contexts[successor] = request_id
        return cast("Result", call.returned)


class PyNativeFunction(BasicFunction, NativeDefinition):
    """Python code that ServeCore runs in a sandbox. Only `source` is sent."""

    call_type = PyNativeCall


def _batch_of(session: "Session") -> "Batch | None":
    from parrot.frontend.pfunc.batch import batch_of  # Imports asyncio, which a session has loaded.

    return batch_of(session)
