"""A program's handle of a semantic variable: text that exists now or later."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypeVar

from parrot.frontend.pfunc.metadata import Criteria
from parrot.frontend.pfunc.read_options import Limit, ReadOptions, read_options
from parrot.protocol.errors import AlreadySet, Cancelled, InvalidRequest, ValidationFailed
from parrot.protocol.fields import PerformanceCriteria

if TYPE_CHECKING:
    from parrot.frontend.pfunc.pending_request import PendingRequest
    from parrot.frontend.pfunc.session import Session
    from parrot.protocol.public import TokenUsage, VarGetResponse
    from parrot.protocol.sampling import TokenLogprob

_THROUGHPUT = PerformanceCriteria.THROUGHPUT
_LATENCY = PerformanceCriteria.LATENCY

Value = TypeVar("Value", covariant=True, default=Any)


class CurrentSession:
    """The session for calls: the session of the innermost scope in this context, or else the
    process's session. Threads and notebook cells have their own contexts, so they use the
    latter."""

    def __init__(self) -> None:
        self.of_context: ContextVar[Session | None] = ContextVar("parrot_session", default=None)
        self.of_process: Session | None = None

    def get(self) -> "Session | None":
        return self.of_context.get() or self.of_process


current_session = CurrentSession()


class SemanticVariable(Generic[Value]):
    """Text that is written once. A read starts the call that produces the text, and all calls that
    this call needs. Reads raise the error of a failed call, `TimedOut` after `timeout` seconds, and
    `SessionGone` after the end of the session. `deadline`: seconds from now until the reader wants
    the value. Any thread and any event loop may read a variable."""

    __slots__ = (
        "_content",
        "_id",
        "_is_cancelled",
        "_session",
        "draft",
        "finish_reason",
        "logprobs",
        "model",
        "name",
        "on_cancel",
        "usage",
    )

    def __init__(
        self,
        name: str | None = None,
        content: str | None = None,
        model: Any = None,
    ) -> None:
        self.name = name if name is not None else f"var_{secrets.token_hex(4)}"
        self._content = content
        self.model = model
        """The type that `get` parses the JSON text into. None: `get` returns the text."""
        self._is_cancelled = False
        self._id: str | None = None
        self._session: Session | None = None
        self.draft: PendingRequest | None = None  # The unsent request that registers the variable.
        self.on_cancel: Callable[[], Awaitable[None]] | None = None
        """Stops the attempts that produce the value. None: a call or the program produces it."""
        self.finish_reason: Literal["stop", "length"] | None = None
        """Set with the value. `length`: the text was cut at `max_gen_length` or because the KV
        cache was full. None: the text was not generated."""
        self.usage: TokenUsage | None = None
        """Set with the value: the tokens of the run that generated the text."""
        self.logprobs: list[TokenLogprob] | None = None
        """Set with the value if the output has `logprobs`: the tokens, and their log probabilities
        and those of the most likely tokens."""

    def __repr__(self) -> str:
        content = "" if self._content is None else f", content={self._content!r}"
        return f"SemanticVariable(name={self.name!r}, id={self._id!r}{content})"

    def _repr_html_(self) -> str:
        """The HTML for notebooks. It does not read the value."""
        from parrot.frontend.pfunc.display.shown import variable_html

        return variable_html(self.name, self._content)

    def __str__(self) -> str:
        """The value, for use in other text. Raises `TypeError` if the program has not read it,
        because the other text would be wrong without an error."""
        if self._content is None:
            raise TypeError(
                f"variable `{self.name}` has no value here yet, so it cannot become part of a "
                "string: pass it to a call as a separate argument, or read it first with get()"
            )
        return self._content

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @property
    def id(self) -> str | None:
        """The id in ServeCore. None: not registered yet."""
        return self._id

    @property
    def content(self) -> str | None:
        """The text, without waiting. None until the program has read or set it."""
        return self._content

    @property
    def session(self) -> "Session | None":
        return self._session

    @property
    def registered_id(self) -> str:
        """The id in ServeCore. The variable must be registered."""
        assert self._id is not None, self
        return self._id

    @property
    def is_registered(self) -> bool:
        """Whether the variable has an id in ServeCore."""
        return self._id is not None

    @property
    def is_ready(self) -> bool:
        """Whether the program has the text already."""
        return self._content is not None

    def attach(self, session: "Session", by: "str | PendingRequest") -> None:
        """Set the id, or the draft that registers the variable. Only for code that registers it."""
        self._session = session
        self._id, self.draft = (by, None) if isinstance(by, str) else (None, by)

    def settle(self, value: "VarGetResponse | SemanticVariable[Any]") -> None:
        """Set the value unless the variable has one. Only for code that has read the value, or
        copies it from another variable."""
        if self._content is not None:
            return
        self.finish_reason, self.usage = value.finish_reason, value.usage
        self.logprobs = value.logprobs
        self._content = value.content

    def set(self, content: str) -> None:
        """Set the value. Raises `AlreadySet` if the variable has a value, or a call produces it."""
        if not isinstance(content, str):
            raise TypeError(f"a variable takes a str, not {type(content).__name__}")
        if self._content is not None:
            raise AlreadySet(f"variable `{self.name}` is already set")
        if self._session is not None:
            self._session.loop.run(_set(self._session, self, content))
        self._content = content

    def get(
        self, criteria: Criteria = _THROUGHPUT, timeout: Limit = None, deadline: Limit = None
    ) -> Value:
        """Wait for the value and return it: the text, or an object of the output's type. Raises
        `ValidationFailed` if the text is not valid for the type, for example because it was cut.
        `content` has the text in this case too."""
        if self._content is None:
            session = self.live_session()
            options = read_options(criteria, timeout, deadline, blocked=True)
            session.loop.run(read_value(session, self, options))
        return self._value()

    async def aget(
        self, criteria: Criteria = _THROUGHPUT, timeout: Limit = None, deadline: Limit = None
    ) -> Value:
        """Wait for the value, as `get` does. Cancelling withdraws the read."""
        if self._content is None:
            session = self.live_session()
            reading = read_value(session, self, read_options(criteria, timeout, deadline))
            await session.loop.arun(reading)
        return self._value()

    def _value(self) -> Value:
        assert self._content is not None, self
        if self.model is None:
            return cast("Value", self._content)
        try:
            return cast("Value", TypeAdapter(self.model).validate_json(self._content))
        except ValidationError as error:
            cut = ", because it was cut at max_gen_length" * (self.finish_reason == "length")
            first = error.errors(include_url=False, include_input=False)[0]
            name = getattr(self.model, "__name__", self.model)
            raise ValidationFailed(
                f"the value of `{self.name}` is not a valid {name}{cut}: {first['msg']}"
            ) from None

    def __await__(self) -> Generator[Any, Any, Value]:
        """`await v` is `await v.aget()`."""
        return self.aget().__await__()

    def stream(
        self, criteria: Criteria = _LATENCY, timeout: Limit = None, deadline: Limit = None
    ) -> Iterator[str]:
        """Yield the text in chunks while it is generated, from its start. Leaving the loop early
        withdraws the read."""
        if self._content is not None:
            yield from (self._content,) if self._content else ()
            return
        session = self.live_session()
        options = read_options(criteria, timeout, deadline)
        yield from session.loop.items(partial(_stream, session, self, options))

    async def astream(
        self, criteria: Criteria = _LATENCY, timeout: Limit = None, deadline: Limit = None
    ) -> AsyncIterator[str]:
        """`stream` for async code. `aclose` on the iterator withdraws the read at once."""
        if self._content is not None:
            if self._content:
                yield self._content
            return
        session = self.live_session()
        options = read_options(criteria, timeout, deadline)
        produce = partial(_stream, session, self, options)
        async with aclosing(session.loop.aitems(produce)) as pieces:
            async for piece in pieces:
                yield piece

    def cancel(self) -> None:
        """Cancel the work for this variable. All its readers get `Cancelled`. Has no effect if
        the value exists already."""
        if self._session is not None:
            self._session.loop.run(cancel(self._session, self))
        else:
            self._is_cancelled = self._content is None

    def live_session(self) -> "Session":
        """The session for reads. Raises `InvalidRequest` if the variable belongs to no session."""
        if self._is_cancelled:
            raise Cancelled(f"variable `{self.name}` was cancelled")
        if self._session is None:
            raise InvalidRequest(
                f"variable `{self.name}` has no value and belongs to no session: "
                "create it inside vm.running_scope() or vm.run(), or set it"
            )
        return self._session


# On the session's loop


async def id_of(var: SemanticVariable) -> str:
    """The variable's id. First sends the draft that registers the variable, if any."""
    if var.draft is not None:
        await var.draft.send()
    return var.registered_id


async def register(session: "Session", var: SemanticVariable) -> None:
    var.attach(session, await session.create_variable(var.name, var.content))


async def read_value(session: "Session", var: SemanticVariable, options: ReadOptions) -> None:
    var.settle(await session.read(await id_of(var), var.name, options))


async def cancel(session: "Session", var: SemanticVariable) -> None:
    if var.on_cancel is None:
        await session.cancel(await id_of(var))
    else:
        await var.on_cancel()


async def _set(session: "Session", var: SemanticVariable, content: str) -> None:
    await session.set(await id_of(var), content)


async def _stream(
    session: "Session", var: SemanticVariable, options: ReadOptions, emit: Callable[[str], None]
) -> None:
    await session.stream(await id_of(var), var.name, options, emit, var.settle)
