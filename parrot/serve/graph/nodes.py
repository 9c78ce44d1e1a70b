"""Tasks, the nodes of a session's graph: native calls, and the completions of a semantic call.

A call with the template "A {{x}} B {{y}} C {{z}}" (input x; outputs y, z) runs as two completions:

    completion 0:  Fill "A ", x, " B "    Generate y
    completion 1:  Fill " C "             Generate z      previous = completion 0

The prompt of completion 1 is the whole of completion 0, its output included, and then its own fill.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.engine_api import FinishReason
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.variable import SemanticVariable


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Constant text of a template, or the system message of a chat, which comes before it."""

    text: str
    is_system: bool = False


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

    @property
    def is_final(self) -> bool:
        return self in _FINAL_STATES


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
    finish_reason: FinishReason | None = None  # why the text ends, once it does
    is_reused: bool = False  # the result of an identical call was taken: nothing was computed


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The parts of a semantic call's metadata that matter after the graph is built."""

    func_name: str
    models: tuple[str, ...] = ()  # empty: any
    cache_prefix: bool = True
    chat: bool = False
    tenant: str = ""
    reuse: bool = True  # identical deterministic calls may share a run


@dataclass(slots=True, eq=False)
class Completion:
    """One `Fill ... Fill Generate`: the unit of scheduling. Its state is owned by the session's
    graph up to QUEUED, and by the executor while it is QUEUED or RUNNING."""

    id: int  # unique in this ServeCore
    request_id: int
    session_id: int
    options: CallOptions
    fill: tuple[Piece, ...]
    output: SemanticVariable
    sampling: SamplingConfig
    previous: "Completion | None" = None
    state: CompletionState = CompletionState.IDLE
    objective: Objective | None = None
    wants_stream: bool = False  # a reader wants tokens as they come
    may_lose: bool = False  # it is in a race: its text is kept as it comes, to go on when it lost
    times: Timeline = field(default_factory=Timeline)
    stats: RunStats = field(default_factory=RunStats)

    @property
    def func_name(self) -> str:
        return self.options.func_name

    def inputs(self) -> Iterator[SemanticVariable]:
        """The variables that must be ready before it can run, with repetitions."""
        if self.previous is not None:
            yield self.previous.output
        for piece in self.fill:
            if isinstance(piece, VariablePiece):
                yield piece.variable

    def outputs(self) -> Iterator[SemanticVariable]:
        yield self.output

    def prompt(self) -> list[Piece]:
        """Every piece from the beginning of its context to the place where it generates."""
        chain: list[Completion] = [self]
        while (before := chain[-1].previous) is not None:
            chain.append(before)
        pieces: list[Piece] = []
        for completion in reversed(chain):
            pieces.extend(completion.fill)
            if completion is not self:
                pieces.append(VariablePiece(completion.output))
        return pieces


@dataclass(slots=True, eq=False)
class NativeCall:
    """One run of a native function: a node of the same graph, run by ServeCore's sandbox. Its
    state has the same words as a completion's; the sandbox owns it while QUEUED or RUNNING."""

    id: int  # unique in this ServeCore, among completions too
    request_id: int
    session_id: int
    func_name: str
    source: str
    timeout_s: float
    tenant: str
    arguments: tuple[tuple[str, SemanticVariable], ...]  # the inputs, by parameter name
    results: tuple[tuple[str, SemanticVariable], ...]  # the outputs, by parameter name
    state: CompletionState = CompletionState.IDLE
    objective: Objective | None = None
    times: Timeline = field(default_factory=Timeline)

    def inputs(self) -> Iterator[SemanticVariable]:
        return (variable for _, variable in self.arguments)

    def outputs(self) -> Iterator[SemanticVariable]:
        return (variable for _, variable in self.results)


Task = Completion | NativeCall
