"""A completion as the scheduler knows it, and its decisions."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.graph.nodes import Completion, Objective, PieceKind
from parrot.serve.prompts.segments import Segment

_NO_OBJECTIVE = Objective(PerformanceCriteria.LATENCY, depth=0, remaining_path_s=0.0)


@dataclass(slots=True, eq=False)
class CompletionTask:
    """A prompt to be run, and how, of the completion that asked for it first.

    `needs`: what its engine must be able to do, see `Capabilities`. `keys[i]` is the prefix key of
    the prompt that ends with segment i, and `lengths[i]` an estimate of that segment's tokens.
    `expected_output`: tokens that the output is predicted to have. `used`: the tokens of its prompt
    that were computed, and those that were generated, once an engine has told. `service_s`: seconds
    of engines that it has had."""

    completion: Completion
    segments: list[Segment]
    keys: tuple[bytes, ...]
    arrived: float
    expected_output: int
    tokens_per_char: float = 0.25  # of the text whose tokens are not known
    avoided: set[int] = field(default_factory=set)  # engines that failed with it
    num_passed: int = 0  # times the scheduler placed later tasks before it
    used: tuple[int, int] | None = None
    service_s: float = 0.0
    wanted_len: int = field(init=False)  # tokens of prompt and output, as long as both may be
    tenant: str = field(init=False)
    models: tuple[str, ...] = field(init=False)
    needs: frozenset[str] = field(init=False)
    conversation: dict[str, Any] | None = field(init=False)
    max_output: int = field(init=False)
    lengths: tuple[int, ...] = field(init=False)
    prompt_len: int = field(init=False)
    is_latency: bool = field(init=False)  # someone waits for this very output or its tokens
    is_background: bool = field(init=False)  # no reader waits for it, or for what needs it
    remaining_path_s: float = field(init=False)
    deadline: float | None = field(init=False)
    group: tuple[int, str] | None = field(init=False)

    def __post_init__(self) -> None:
        options = self.completion.options
        self.tenant, self.models = options.tenant, options.models
        self.conversation = self.completion.conversation
        self.needs = self.completion.sampling.needs()
        if self.conversation is not None:  # all servers that take one keep to schemas there
            own = {"messages", "tools"} if "tools" in self.conversation else {"messages"}
            self.needs = self.needs - {"json_schema"} | own
        self.max_output = self.completion.sampling.max_gen_length
        self.lengths = tuple([_num_tokens(s, self.tokens_per_char) for s in self.segments])
        self.prompt_len = sum(self.lengths)
        self.wanted_len = self.prompt_len + self.max_output
        self.refresh()

    @property
    def num_chars(self) -> int:
        """Characters of the prompt."""
        return sum([segment.num_chars for segment in self.segments])

    @property
    def objective(self) -> Objective | None:
        return self.completion.objective

    @property
    def wants_stream(self) -> bool:
        return self.completion.wants_stream

    def refresh(self) -> None:
        """Read the objective anew. Only while no queue or engine counts the task."""
        objective = self.objective or _NO_OBJECTIVE
        self.is_latency = objective.criteria is not PerformanceCriteria.THROUGHPUT
        self.is_background = objective.is_background
        self.remaining_path_s = objective.remaining_path_s
        self.deadline = objective.deadline
        group = objective.task_group
        self.group = None if group is None else (self.completion.session_id, group)

    @property
    def num_constant(self) -> int:
        """Number of segments at the prompt's start that come from the template alone."""
        for i, segment in enumerate(self.segments):
            if segment.kind is not PieceKind.CONSTANT:
                return i
        return len(self.segments)


class EngineShare(NamedTuple):
    """The weight of a call's tenant, and by what part others of the same weight may lengthen the
    call's steps; None: by any."""

    weight: float = 1.0
    step_growth: float | None = None


UNBOUND = EngineShare()


@dataclass(frozen=True, slots=True)
class Placement:
    """Run `task` on this engine now. `priority`: its place in the engine's queue, lower first.
    `is_longest`: no live engine of the task's models takes longer sequences. `share`: its
    tenant's."""

    task: CompletionTask
    engine_id: int
    priority: int
    is_longest: bool = True
    share: EngineShare = UNBOUND


class Decision(NamedTuple):
    """A placement that was made, and what it was chosen from.

    `at` is on the clock's scale, `waited_s` since the call was queued. `costs`: the predicted
    seconds on each engine that was compared, None where it did not fit; None if nothing was
    compared."""

    at: float
    session_id: int
    request_id: int
    func_name: str
    engine_id: int
    prompt_tokens: int
    to_compute: int
    waited_s: float
    costs: dict[int, float | None] | None


def _num_tokens(segment: Segment, tokens_per_char: float) -> int:
    if segment.tokenized is not None:
        return len(segment.tokenized.ids)
    return int(segment.num_chars * tokens_per_char) + 1
