"""Semantic variables and tasks, the nodes of a session's graph. A variable is write-once text with
one producer and many readers; a task is a native call, or one of a semantic call's completions.

    producer ----> variable ----> consumers
    Task           readers        Task, ...

A call with the template "A {{x}} B {{y}} C {{z}}" (input x; outputs y, z) runs as two completions:

    completion 0:  Fill "A ", x, " B "    Generate y
    completion 1:  Fill " C "             Generate z      previous = completion 0

The prompt of completion 1 is the whole of completion 0, its output included, and then its own fill.
"""

import asyncio
import hashlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import AlreadySet, ParrotError
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import Logprobs, SamplingConfig


class VariableState(StrEnum):
    EMPTY = "empty"
    READY = "ready"
    FAILED = "failed"


def text_digest(text: str) -> bytes:
    """A text's identity: SHA-256, 32 bytes. Large texts take a millisecond a megabyte, so whoever
    holds one asks once."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The token ids of a variable's text as an engine generated them, so that a consumer on the
    same tokenizer (see `EngineInfo.tokenizer_id`) need not tokenise the text again."""

    tokenizer_id: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """The identity of these very tokens."""
        return hashlib.sha256(self.tokenizer_id.encode() + array("i", self.ids).tobytes()).digest()


class SemanticVariable:
    """A text to come. Its producer (an engine, a native function or the program) settles it once,
    with `set` or `fail`. Everything that waits for it learns of that from here, and only from here.

    While an engine generates it, `append` extends `partial_text`; readers of `stream` see the
    deltas and always end up with exactly `text`, whenever they came.

    Its place in the graph is between its `producer`, a task or None, and the tasks and readers that
    take it. `origin`: if it failed because an input of its producer did, the first failure."""

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
        "session_id",
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
        self.producer: Task | None = None
        self.consumers: list[Task] = []
        self.readers: list[Reader] = []
        self.origin: ParrotError | None = None
        self._digest: bytes | None = None
        self._stats: RunStats | None = None
        self._settled_callbacks: list[Callable[[SemanticVariable], None]] = []
        self._watchers: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<SemanticVariable {self.name} {self.id} {self.state}>"

    @property
    def text(self) -> str:
        """The value. Only a ready variable has one."""
        assert self.state is VariableState.READY, self
        return self.partial_text

    @property
    def digest(self) -> bytes:
        """The value's. Only a ready variable has one."""
        if self._digest is None:
            self._digest = text_digest(self.text)
        return self._digest

    @property
    def is_settled(self) -> bool:
        return self.state is not VariableState.EMPTY

    @property
    def is_idle(self) -> bool:
        """Whether wanting it would set work going."""
        return self.producer is not None and not self.producer.demand and not self.is_settled

    @property
    def stats(self) -> "RunStats | None":
        """How the completion ran that makes or made it; None: no completion does."""
        return self._stats if self.producer is None else self.producer.stats

    def unlink(self) -> None:
        """Nothing follows from it any more. A reader may be about to tell of it still."""
        self._stats = self.stats
        self.producer = None
        self.consumers.clear()

    def append(self, delta: str) -> None:
        """The producer has generated some more text."""
        assert not self.is_settled, self
        if delta:
            self.partial_text += delta
            self._wake()

    def set(self, text: str, tokenized: TokenizedText | None = None) -> None:
        """Publish the value. `text` begins with what was appended. Raises `AlreadySet`."""
        if self.is_settled:
            raise AlreadySet(f"variable `{self.name}` is already {self.state}")
        assert text.startswith(self.partial_text), (self, self.partial_text, text)
        self.partial_text = text
        self.tokenized = tokenized
        self._settle(VariableState.READY)

    def fail(self, error: ParrotError) -> None:
        """Every reader, now and later, gets `error`. Raises `AlreadySet`."""
        if self.is_settled:
            raise AlreadySet(f"variable `{self.name}` is already {self.state}")
        self.error = error
        self._settle(VariableState.FAILED)

    def reset_partial_text(self) -> None:
        """Forget the partial text: the producer was stopped because nobody reads the variable, and
        appends the text from its beginning if it runs again."""
        assert not self.is_settled, self
        self.partial_text = ""

    def on_settled(self, callback: Callable[["SemanticVariable"], None]) -> None:
        """Call `callback(self)` once, when the variable is settled; at once if it is."""
        if self.is_settled:
            callback(self)
        else:
            self._settled_callbacks.append(callback)

    def forget(self, callback: Callable[["SemanticVariable"], None]) -> None:
        """Take back `on_settled`, if it was not called yet."""
        with suppress(ValueError):
            self._settled_callbacks.remove(callback)

    async def wait(self) -> str:
        """The value, or raises the error. Timeouts and withdrawal are the caller's business."""
        while not self.is_settled:
            await self._changed()
        return self.result()

    def result(self) -> str:
        """The value of a settled variable, or raises its error."""
        if self.error is not None:
            raise self.error.again()
        return self.text

    async def stream(self) -> AsyncIterator[str]:
        """All the text from its beginning, in deltas as they come; raises the error."""
        sent = 0
        while True:
            if len(self.partial_text) > sent:
                delta = self.partial_text[sent:]
                sent = len(self.partial_text)
                yield delta
            elif self.error is not None:
                raise self.error.again()
            elif self.is_settled:
                return
            else:
                await self._changed()

    def _settle(self, state: VariableState) -> None:
        self.state = state
        self._wake()  # first, whatever a callback does
        callbacks, self._settled_callbacks = self._settled_callbacks, []
        for callback in callbacks:
            callback(self)

    def _wake(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def _changed(self) -> None:
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        try:
            await watcher
        finally:
            if watcher.cancelled() and watcher in self._watchers:  # nothing has changed meanwhile
                self._watchers.remove(watcher)


class PieceKind(Enum):
    """The values are part of prefix keys."""

    CONSTANT = b"c"  # text of the template, which may contain special tokens
    SYSTEM = b"s"  # a chat's system message, which comes first
    VALUE = b"v"  # a variable's value, always plain text
    OUTPUT = b"o"  # plain text that was generated behind what precedes it
    TOKENS = b"t"  # tokens that a program chose itself, which begin a prompt


@dataclass(frozen=True)
class TextPiece:
    """Text that is known when the call is submitted. `tokenized`: its tokens, of kind `TOKENS`,
    which its text may not tell."""

    text: str
    kind: PieceKind = PieceKind.CONSTANT
    tokenized: TokenizedText | None = None

    @cached_property
    def digest(self) -> bytes:
        return text_digest(self.text) if self.tokenized is None else self.tokenized.digest


@dataclass(frozen=True, slots=True)
class VariablePiece:
    """The place of a variable's value in a prompt."""

    variable: SemanticVariable


Piece = TextPiece | VariablePiece


@dataclass(frozen=True, slots=True)
class Objective:
    """The purpose of a wanted task, as deduction finds it. Policies read its fields.

    `depth`: calls between it and the demanded output (0: it is the output). `remaining_path_s`:
    predicted seconds from its start to the end of the longest path below it. `task_group`: equal
    for completions that feed the same consumer; None outside a group. `deadline`: on the clock's
    scale. `is_background`: no reader waits for it, or for what needs it."""

    criteria: PerformanceCriteria
    depth: int
    remaining_path_s: float
    task_group: str | None = None
    deadline: float | None = None
    is_background: bool = False


class CompletionState(StrEnum):
    IDLE = "idle"  # nobody wants it yet
    WAITING = "waiting"  # wanted; an input is still missing
    QUEUED = "queued"  # all inputs ready; in the global scheduler
    RUNNING = "running"  # on an engine
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_FINAL_STATES = frozenset({CompletionState.DONE, CompletionState.FAILED, CompletionState.CANCELLED})


@dataclass(slots=True)
class Timeline:
    """When things happened, on the clock's scale; None: not yet."""

    submitted: float | None = None
    activated: float | None = None
    ready: float | None = None
    started: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class RunStats:
    """Where and how the last attempt ran. Written by the executor."""

    engine_name: str | None = None
    model: str | None = None
    attempts: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # of these, those that some context has or had
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0  # that steps verified several at once
    accepted_tokens: int = 0  # of these, those that became output
    decode_s: float | None = None  # from its first token to its last
    service_s: float = 0.0  # of engines' time, as it is shared between tenants
    finish_reason: FinishReason | None = None  # why the text ends, once it does
    stop_string: str | None = None  # the one that ended it
    is_reused: bool = False  # the result of an identical call was taken: nothing was computed
    logprobs: Logprobs | None = None  # of the output's tokens so far, if they are wanted
    comes_whole: str = ""  # why its text is not seen as it comes although somebody wants that
    used_tokens: int = 0  # of prompt and output, without those before it was withdrawn


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The parts of a call's metadata that matter after the graph is built."""

    func_name: str
    models: tuple[str, ...] = ()  # empty: any
    cache_prefix: bool = True
    chat: bool = False
    tenant: str = ""
    cache_salt: str = ""  # calls with another one share nothing with it
    reuse: bool = True  # identical deterministic calls may share a run
    remark: str = ""  # for people who look at the session
    prediction: str = ""  # text that the outputs may repeat
    traceparent: str = ""  # the span of who asked for this call; empty: that of the session


@dataclass(slots=True, eq=False)
class Reader:
    """One who wants a variable from outside of the graph. `is_racing`: it is a race's candidate."""

    variable: SemanticVariable
    criteria: PerformanceCriteria
    deadline: float | None = None  # on the clock's scale
    wants_stream: bool = False
    is_racing: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A task's state, and its place between the variables that it takes and those that it makes.

    The session's graph owns the state up to QUEUED; the dispatcher or the sandbox does while the
    task is QUEUED or RUNNING. `missing` counts its unsettled inputs, `demand` the readers of its
    outputs plus its wanted consumers (one for each of their unsettled inputs that it produces),
    plus the program if that holds the task and was woken. `asked` counts, of these, the readers and
    the consumers that are asked for themselves: a wanted task that nobody asks for is background
    work. `wants` and `asks`: whether its producers count it so; where many tasks change, some hear
    of it in a later turn of the event loop. `allows_background`: it may run in the background;
    `has_background_demand`: the program wants it to.
    `is_started`: it is with the dispatcher or the sandbox now; `is_ended`: its end was handled. The
    last group of fields belongs to deduction, which makes the objective of it, and means something
    only while the task is wanted."""

    id: int  # unique in this ServeCore, among all tasks
    request_id: int
    session_id: int
    options: CallOptions
    state: CompletionState = CompletionState.IDLE
    objective: Objective | None = None  # of a wanted task
    times: Timeline = field(default_factory=Timeline)

    inputs: tuple[SemanticVariable, ...] = field(init=False)  # distinct
    outputs: tuple[SemanticVariable, ...] = field(init=False)
    missing: int = 0
    demand: int = 0
    reader_demand: int = 0
    is_counted: bool = False
    is_counted_as_read: bool = False
    allows_background: bool = True
    has_background_demand: bool = False
    is_started: bool = False
    is_ended: bool = False
    traceparent: str = ""  # its own span, or that of who asked for it; empty: it is not traced

    criteria: PerformanceCriteria = PerformanceCriteria.THROUGHPUT
    depth: int = 0
    duration_s: float = 0.0
    work_s: float = 0.0
    path_s: float = 0.0  # its duration and that of the longest path of wanted tasks below it
    num_awaited: int = 0  # inputs that were missing when it became wanted
    ready_in_s: float = 0.0  # the longest path of wanted tasks above it, when it became wanted
    group: int | None = None  # the id of the consumer whose stage it belongs to
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
        """Yield the tasks that make its unsettled inputs, once for each input."""
        for variable in self.inputs:
            if variable.producer is not None and not variable.is_settled:
                yield variable.producer

    def open_consumers(self) -> "Iterator[Task]":
        """Yield the unfinished tasks that wait for its unsettled outputs, once for each output."""
        for variable in self.outputs:
            if not variable.is_settled:
                for task in variable.consumers:
                    if not task.is_finished:
                        yield task

    def wanted_consumers(self) -> "list[Task]":
        """The open consumers that are wanted."""
        return [consumer for consumer in self.open_consumers() if consumer.is_counted]

    def readers(self) -> Iterator[Reader]:
        for variable in self.outputs:
            yield from variable.readers


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Completion(Node):
    """One `Fill ... Fill Generate`: the unit of scheduling."""

    fill: tuple[Piece, ...]
    output: SemanticVariable
    sampling: SamplingConfig
    previous: "Completion | None" = None
    wants_stream: bool = False  # a reader wants tokens as they come
    is_racing: bool = False  # it is in a race: its text is kept as it comes, to go on when it lost
    stats: RunStats = field(default_factory=RunStats)
    conversation: dict[str, Any] | None = None  # that its server renders, until it is settled

    def __post_init__(self) -> None:
        before = [] if self.previous is None else [self.previous.output]
        taken = [piece.variable for piece in self.fill if isinstance(piece, VariablePiece)]
        self.inputs = tuple(dict.fromkeys(before + taken))
        self.outputs = (self.output,)

    @property
    def is_repeatable(self) -> bool:
        """Whether an identical one may take its result."""
        return self.options.reuse and self.sampling.is_deterministic


@dataclass(slots=True, eq=False, kw_only=True)
class NativeCall(Node):
    """One run of a native function by ServeCore's sandbox."""

    source: str
    timeout_s: float
    arguments: tuple[tuple[str, SemanticVariable], ...]  # the inputs, by parameter name
    results: tuple[tuple[str, SemanticVariable], ...]  # the outputs, by parameter name

    @property
    def stats(self) -> None:
        return None

    def __post_init__(self) -> None:
        self.inputs = tuple(dict.fromkeys(variable for _, variable in self.arguments))
        self.outputs = tuple(variable for _, variable in self.results)


Task = Completion | NativeCall


default_func_name = "call_{}".format
"""The function's name of a call that gave none, by the id of its request."""


def given_name(task: Task) -> str:
    """The function's name that the program gave; empty if it gave none."""
    name = task.options.func_name
    return "" if name == default_func_name(task.request_id) else name


class Executor(Protocol):
    """The verbs that the graph asks of the layers that run tasks. Results come back through the
    variables, possibly before the call returns."""

    def start(self, task: Task) -> None:
        """Run `task`: its inputs are ready and it has an objective."""
        ...

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        """A wanted completion waits for inputs: called when it becomes wanted, and again whenever
        one of its inputs is settled while others are missing. It ends with `start`,
        `stop_expecting` or `finished`, whichever comes first. `forecast` may be called until then:
        when the last input is predicted to come, on the clock's scale; infinite if nobody knows."""
        ...

    def stop_expecting(self, completion: Completion) -> None:
        """Expect the completion no more, if it was expected: it is not wanted now, or has ended
        without having been started."""
        ...

    def withdraw(self, task: Task) -> None:
        """Stop a started task without settling its outputs; it may be started again later."""
        ...

    def cancel(self, task: Task, error: ParrotError) -> None:
        """Stop a started task and fail its unsettled outputs with `error`."""
        ...

    def reprioritise(self, completion: Completion) -> None:
        """The objective of a started completion became stricter, or a reader wants its tokens."""
        ...

    def finished(self, task: Task) -> None:
        """A task ended in a final state (for counting; must not raise)."""
        ...

    def update_remaining_work(self, session_id: int, remaining_s: float) -> None:
        """The session's wanted tasks that are not finished, waiting ones included, are so many
        seconds of work in sum. Comes before `start` of those that just became wanted."""
        ...


class Prediction(NamedTuple):
    """`seconds`: how long one run takes. `work_s`: how long it would take if nothing else ran: how
    much work it is."""

    seconds: float
    work_s: float


class Predictor(Protocol):
    def predict(self, task: Task) -> Prediction:
        """Predict one run by what is known now."""
        ...
