"""Semantic variables and tasks, the nodes of a session's graph. A variable is write-once text with
one producer and many readers. A task is a native call or one completion of a semantic call.

    producer ----> variable ----> consumers
    Task           readers        Task, ...

A call with the template "A {{x}} B {{y}} C {{z}}" (input x; outputs y, z) runs as two completions:

    completion 0:  Fill "A ", x, " B "    Generate y
    completion 1:  Fill " C "             Generate z      previous = completion 0

The prompt of completion 1 is the prompt of completion 0, then y, then its own fill.
"""

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import AlreadySet, ParrotError, Unavailable
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import Logprobs, SamplingConfig


class VariableState(StrEnum):
    EMPTY = "empty"
    READY = "ready"
    FAILED = "failed"


def text_digest(text: str) -> bytes:
    """The SHA-256 of the text, 32 bytes. It takes about 1 ms per megabyte, so callers cache it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The token ids of a text as an engine generated them. A consumer with the same tokenizer (see
    `EngineInfo.tokenizer_id`) need not tokenise the text again."""

    tokenizer_id: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the tokenizer's id and the token ids."""
        return hashlib.sha256(self.tokenizer_id.encode() + array("i", self.ids).tobytes()).digest()


class SemanticVariable:
    """Text that may not exist yet. Its producer (an engine, a native function or the program)
    settles it once, with `set` or `fail`, and it notifies all its waiters.

    `append` extends `partial_text` during generation. A reader of `stream` always receives exactly
    `text` in total, no matter when it started."""

    __slots__ = (
        "_digest",
        "_settled_callbacks",
        "_stats",
        "_watchers",
        "consumers",
        "error",
        "id",
        "name",
        "origin",
        "partial_text",
        "producer",
        "readers",
        "record_seq",
        "session_id",
        "set_at",
        "state",
        "tokenized",
    )

    def __init__(self, var_id: str, name: str, session_id: int) -> None:
        self.id = var_id
        self.name = name
        self.session_id = session_id
        self.state = VariableState.EMPTY
        self.partial_text = ""
        self.error: ParrotError | None = None
        self.tokenized: TokenizedText | None = None
        self.set_at: float | None = None  # When the program set the value, on the clock's scale.
        self.producer: Task | None = None
        self.consumers: list[Task] = []
        self.readers: list[Reader] = []
        # The first failure, if this variable failed because an input of its producer failed.
        self.origin: ParrotError | None = None
        self.record_seq = 0  # The journal record that readers wait for. 0: none.
        self._digest: bytes | None = None
        self._stats: RunStats | None = None
        self._settled_callbacks: list[Callable[[SemanticVariable], None]] = []
        self._watchers: list[asyncio.Future[ParrotError | None]] = []

    def __repr__(self) -> str:
        return f"<SemanticVariable {self.name} {self.id} {self.state}>"

    @property
    def text(self) -> str:
        """The value of a ready variable."""
        assert self.state is VariableState.READY, self
        return self.partial_text

    @property
    def digest(self) -> bytes:
        """The digest of the value of a ready variable."""
        if self._digest is None:
            self._digest = text_digest(self.text)
        return self._digest

    @property
    def is_settled(self) -> bool:
        return self.state is not VariableState.EMPTY

    @property
    def is_idle(self) -> bool:
        """Whether a reader of the variable would start work."""
        return self.producer is not None and not self.producer.demand and not self.is_settled

    @property
    def stats(self) -> "RunStats | None":
        """Statistics of the completion that is the producer. None: the producer is no
        completion."""
        return self._stats if self.producer is None else self.producer.stats

    def unlink(self) -> None:
        """Remove the variable from the graph."""
        self._stats = self.stats  # A reader may still report the statistics.
        self.producer = None
        self.consumers.clear()

    def append(self, delta: str) -> None:
        """Add generated text."""
        assert not self.is_settled, self
        if delta:
            self.partial_text += delta
            self._wake()

    def set(self, text: str, tokenized: TokenizedText | None = None) -> None:
        """Set the value. `text` must start with `partial_text`. Raises `AlreadySet`."""
        if self.is_settled:
            raise AlreadySet(f"variable `{self.name}` is already {self.state}")
        assert text.startswith(self.partial_text), (self, self.partial_text, text)
        self.partial_text = text
        self.tokenized = tokenized
        self._settle(VariableState.READY)

    def fail(self, error: ParrotError) -> None:
        """Fail the variable: all present and future readers get `error`. Raises `AlreadySet`."""
        if self.is_settled:
            raise AlreadySet(f"variable `{self.name}` is already {self.state}")
        self.error = error
        self._settle(VariableState.FAILED)

    def reset_partial_text(self) -> None:
        """Remove the partial text after the producer was withdrawn. If the producer runs again, it
        appends the text from the start."""
        assert not self.is_settled, self
        self.partial_text = ""

    def on_settled(self, callback: Callable[["SemanticVariable"], None]) -> None:
        """Call `callback(self)` once, when the variable is settled. If it is settled already, call
        it now."""
        if self.is_settled:
            callback(self)
        else:
            self._settled_callbacks.append(callback)

    def forget(self, callback: Callable[["SemanticVariable"], None]) -> None:
        """Remove a callback of `on_settled` that was not called yet."""
        with suppress(ValueError):
            self._settled_callbacks.remove(callback)

    def refuse(self, error: ParrotError) -> None:
        """Raise `error` in all present waiters, except patient streams. The variable is unchanged,
        so later readers wait for its value."""
        self._wake(error)
        for reader in list(self.readers):
            if reader.on_refused is not None:
                reader.on_refused(self, error)

    async def wait(self) -> str:
        """Wait until the variable is settled. Returns the value, or raises the error. The caller
        handles timeouts and removes its reader."""
        while not self.is_settled:
            if (refusal := await self._wait_for_change()) is not None:
                raise refusal.again()
        return self.result()

    def result(self) -> str:
        """Return the value of a settled variable, or raise its error."""
        if self.error is not None:
            raise self._own_error()
        return self.text

    async def text_after(self, start: int, *, is_patient: bool = False) -> str | None:
        """Wait for text after the first `start` characters. None: there is no more. Raises the
        error after the last text. If `is_patient`, `refuse` has no effect."""
        while len(self.partial_text) <= start:
            if self.error is not None:
                raise self._own_error()
            if self.is_settled:
                return None
            refusal = await self._wait_for_change()
            if refusal is not None and not is_patient:
                raise refusal.again()
        return self.partial_text[start:]

    def _own_error(self) -> ParrotError:
        assert self.error is not None, self
        error = self.error.again()
        # `Unavailable` comes from a shutdown. The next process may have the session.
        error.is_final = type(error) is not Unavailable
        return error

    def _settle(self, state: VariableState) -> None:
        self.state = state
        self._wake()  # Readers wake up even if a callback raises.
        callbacks, self._settled_callbacks = self._settled_callbacks, []
        for callback in callbacks:
            callback(self)

    def _wake(self, refusal: ParrotError | None = None) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(refusal)

    async def _wait_for_change(self) -> ParrotError | None:
        """Wait for a change of the variable. Returns the error of `refuse`, if it was called."""
        loop = asyncio.get_running_loop()
        watcher: asyncio.Future[ParrotError | None] = loop.create_future()
        self._watchers.append(watcher)
        try:
            return await watcher
        finally:
            if watcher.cancelled() and watcher in self._watchers:  # `_wake` was not called.
                self._watchers.remove(watcher)


class PieceKind(bytes, Enum):
    """The kind of a part of a prompt. Prefix keys contain these bytes."""

    CONSTANT = b"c"  # Text of the template, which may contain special tokens.
    SYSTEM = b"s"  # The system message at the start of a chat.
    VALUE = b"v"  # A variable's value, always plain text.
    OUTPUT = b"o"  # Plain text that was generated after the preceding pieces.
    TOKENS = b"t"  # Token ids from the program, at the start of a prompt.


@dataclass(frozen=True)
class TextPiece:
    """Text that is known when the call is submitted."""

    text: str
    kind: PieceKind = PieceKind.CONSTANT
    tokenized: TokenizedText | None = None  # The token ids of a piece of kind `TOKENS`.

    @cached_property
    def digest(self) -> bytes:
        return text_digest(self.text) if self.tokenized is None else self.tokenized.digest


@dataclass(frozen=True, slots=True)
class VariablePiece:
    """A variable whose value is part of a prompt."""

    variable: SemanticVariable


Piece = TextPiece | VariablePiece


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a wanted task: the input of scheduling policies. Deduction computes it."""

    criteria: PerformanceCriteria
    depth: int  # Calls from the task to the output that is read. 0: the task makes this output.
    remaining_path_s: float  # Predicted seconds of the task and the longest path after it.
    task_group: str | None = None  # The same for tasks of one stage. None: not in a stage.
    deadline: float | None = None  # On the clock's scale.
    is_background: bool = False  # No reader waits for the task or for its consumers.


class CompletionState(StrEnum):
    IDLE = "idle"  # Without demand.
    WAITING = "waiting"  # Wanted, and an input is missing.
    QUEUED = "queued"  # All inputs are ready, and the task waits for an engine.
    RUNNING = "running"  # On an engine.
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_FINAL_STATES = frozenset({CompletionState.DONE, CompletionState.FAILED, CompletionState.CANCELLED})


@dataclass(slots=True)
class Timeline:
    """Times of a task's states, on the clock's scale. None: not reached yet."""

    submitted: float | None = None
    activated: float | None = None
    ready: float | None = None
    started: float | None = None
    first_token: float | None = None  # Of the last attempt. None also if it was not observed.
    finished: float | None = None


@dataclass(slots=True)
class RunStats:
    """Statistics of a task's last attempt. The executor writes them."""

    engine_name: str | None = None
    model: str | None = None
    attempts: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # Computed tokens that another context has or had.
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0  # Draft tokens that the engine verified.
    accepted_tokens: int = 0  # Draft tokens that became output.
    decode_s: float | None = None  # Seconds from the first output token to the last.
    service_s: float = 0.0  # Engine seconds that the tenant is charged.
    finish_reason: FinishReason | None = None  # Set when the output is complete.
    stop_string: str | None = None  # The stop string that ended the output.
    is_reused: bool = False  # The result of an identical call was used, and nothing was computed.
    reused_from: int | None = None  # The session of that identical call.
    logprobs: Logprobs | None = None  # Of the output tokens so far, if they were requested.
    is_streamed: bool = False  # From its first token, so its time will be known. Not journaled.
    comes_whole: str = ""  # The reason why the text is not streamed although a reader asks for it.
    extra: dict[str, Any] | None = None  # Other fields of a foreign server's answer. Not journaled.
    used_tokens: int = 0  # Prompt and output tokens, without tokens counted before a withdrawal.


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call that are used after the graph is built."""

    func_name: str
    models: tuple[str, ...] = ()  # Empty: all models.
    cache_prefix: bool = True
    chat: bool = False
    tenant: str = ""
    cache_salt: str = ""  # Calls with different salts do not share cached prefixes or results.
    reuse: bool = True  # Identical deterministic calls may share one run.
    remark: str = ""  # Text that the page shows next to the call.
    prediction: str = ""  # Text that the output may repeat.
    traceparent: str = ""  # The caller's span. Empty: the session's span.
    request_id: str = ""  # Of the client's request, for a foreign server.
    client_key: str = field(default="", repr=False)  # For a foreign server. Not journaled.


@dataclass(slots=True, eq=False)
class Reader:
    """A client's read of a variable. It keeps the producer wanted."""

    variable: SemanticVariable
    criteria: PerformanceCriteria
    deadline: float | None = None  # On the clock's scale.
    wants_stream: bool = False
    is_racing: bool = False  # The variable is a candidate of a race.
    has_client: bool = True  # False: a call with `output_criteria`, which runs at once.
    on_refused: "Callable[[SemanticVariable, ParrotError], None] | None" = None  # See `refuse`.


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A task of the graph: its state, its input and output variables, and the demand for it.

    The session's graph owns `state` until QUEUED. The dispatcher or the sandbox owns `state` while
    the task is QUEUED or RUNNING."""

    id: int  # Unique among all tasks of this ServeCore.
    request_id: int
    session_id: int
    options: CallOptions
    state: CompletionState = CompletionState.IDLE
    objective: Objective | None = None  # None: the task is not wanted.
    times: Timeline = field(default_factory=Timeline)

    inputs: tuple[SemanticVariable, ...] = field(init=False)  # Without duplicates.
    outputs: tuple[SemanticVariable, ...] = field(init=False)
    missing: int = 0  # Unsettled inputs.
    # Readers of the outputs, plus wanted consumers, plus 1 for background demand. A consumer counts
    # once for each unsettled output that it takes.
    demand: int = 0
    # The part of `demand` that leads to a reader. A wanted task without it is background work.
    reader_demand: int = 0
    # Whether the producers count this task in their `demand` and `reader_demand`. The producers may
    # be updated in a later turn of the event loop.
    is_counted: bool = False
    is_counted_as_read: bool = False
    allows_background: bool = True  # The task may run without a reader.
    in_background: bool = False  # The program demands the task in the background.
    is_started: bool = False  # The dispatcher or the sandbox has the task.
    is_end_handled: bool = False  # The end of the task was handled.
    traceparent: str = ""  # The task's span, or the caller's. Empty: the task is not traced.

    # Deduced fields. They are valid while the task is wanted. See `deduce`.
    criteria: PerformanceCriteria = PerformanceCriteria.THROUGHPUT
    depth: int = 0
    duration_s: float = 0.0
    work_s: float = 0.0
    path_s: float = 0.0  # Seconds of the task and the longest path of wanted consumers after it.
    num_awaited: int = 0  # Inputs that were missing when the task became wanted.
    # Seconds of the longest path of wanted producers, predicted when the task became wanted.
    ready_in_s: float = 0.0
    group: int | None = None  # The id of the consumer whose stage has the task.
    deadline: float | None = None

    @property
    def func_name(self) -> str:
        return self.options.func_name

    @property
    def is_finished(self) -> bool:
        return self.state in _FINAL_STATES

    @property
    def is_wanted(self) -> bool:
        return self.is_counted and self.state not in _FINAL_STATES

    def producers(self) -> "Iterator[Task]":
        """Yield the producers of the unsettled inputs, once for each input."""
        for variable in self.inputs:
            if variable.producer is not None and not variable.is_settled:
                yield variable.producer

    def open_consumers(self) -> "Iterator[Task]":
        """Yield the unfinished consumers of the unsettled outputs, once for each output."""
        for variable in self.outputs:
            if not variable.is_settled:
                for task in variable.consumers:
                    if not task.is_finished:
                        yield task

    def wanted_consumers(self) -> "list[Task]":
        """The open consumers that count in `demand`."""
        found: list[Task] = []
        for variable in self.outputs:
            if variable.consumers and not variable.is_settled:
                found += [task for task in variable.consumers if task.is_wanted]
        return found

    def readers(self) -> list[Reader]:
        return [reader for variable in self.outputs for reader in variable.readers]


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Completion(Node):
    """One `Fill ... Fill Generate` of a semantic call: the unit of scheduling."""

    fill: tuple[Piece, ...]
    output: SemanticVariable
    sampling: SamplingConfig
    previous: "Completion | None" = None
    wants_stream: bool = False  # A reader streams the output.
    # The output is a candidate of a race. Its text is delivered during generation, so that the
    # completion can continue if it loses the race.
    is_racing: bool = False
    stats: RunStats = field(default_factory=RunStats)
    conversation: dict[str, Any] | None = None  # Messages for a server that renders the prompt.
    # The inputs whose values replace marks in the messages, by mark.
    conversation_inputs: Mapping[str, SemanticVariable] | None = None

    def __post_init__(self) -> None:
        before = [] if self.previous is None else [self.previous.output]
        taken = [piece.variable for piece in self.fill if isinstance(piece, VariablePiece)]
        self.inputs = tuple(dict.fromkeys(before + taken))
        self.outputs = (self.output,)

    @property
    def is_repeatable(self) -> bool:
        """Whether an identical completion may use the result."""
        return self.options.reuse and self.sampling.is_deterministic


@dataclass(slots=True, eq=False, kw_only=True)
class NativeCall(Node):
    """One call of a native function, which runs in ServeCore's sandbox."""

    source: str
    timeout_s: float
    arguments: tuple[tuple[str, SemanticVariable], ...]  # Inputs by parameter name.
    results: tuple[tuple[str, SemanticVariable], ...]  # Outputs by parameter name.

    @property
    def stats(self) -> None:
        return None

    def __post_init__(self) -> None:
        self.inputs = tuple(dict.fromkeys(variable for _, variable in self.arguments))
        self.outputs = tuple(variable for _, variable in self.results)


Task = Completion | NativeCall


default_func_name = "call_{}".format
"""Returns the function name of a call without a name, from its request id."""


def given_name(task: Task) -> str:
    """The function name from the program. Empty: the program gave no name."""
    name = task.options.func_name
    return "" if name == default_func_name(task.request_id) else name


class Executor(Protocol):
    """The interface of the graph to the layers that run tasks. An executor settles the outputs of a
    task, possibly before a method returns."""

    def start(self, task: Task) -> None:
        """Run `task`. Its inputs are ready, and it has an objective."""
        ...

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        """A wanted completion waits for inputs. Is called when the completion becomes wanted, and
        each time an input is settled while others are missing.

        Valid until `start`, `stop_expecting` or `finished`. `forecast` predicts when the last input
        is ready, on the clock's scale. Infinite: unknown."""
        ...

    def stop_expecting(self, completion: Completion) -> None:
        """The completion is no longer wanted, or has finished without a start. Does nothing if it
        was not expected."""
        ...

    def withdraw(self, task: Task) -> None:
        """Stop a started task without settling its outputs. The task may be started again."""
        ...

    def cancel(self, task: Task, error: ParrotError) -> None:
        """Stop a started task and fail its unsettled outputs with `error`."""
        ...

    def reprioritise(self, completion: Completion) -> None:
        """The objective of a started completion, its `wants_stream` or its `is_racing` has
        changed."""
        ...

    def finished(self, task: Task) -> None:
        """A task has reached a final state. Is used for counting. Must not raise."""
        ...

    def update_remaining_work(self, session_id: int, remaining_s: float) -> None:
        """The session's wanted and unfinished tasks have `remaining_s` seconds of work. Is called
        before `start` of newly wanted tasks."""
        ...


class Prediction(NamedTuple):
    """The predicted duration of one run of a task."""

    seconds: float  # Under the present load.
    work_s: float  # On an idle engine.


class Predictor(Protocol):
    def predict(self, task: Task) -> Prediction:
        """Predict one run of the task from the current statistics."""
        ...
