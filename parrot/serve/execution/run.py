"""One run of a task on an engine, and what came of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.contexts.index import Context
from parrot.serve.execution.engines import Engine
from parrot.serve.prompts.encode import Units
from parrot.serve.prompts.tokenizers import Ids, ModelTokenizer
from parrot.serve.scheduling.task import CompletionTask


@dataclass(slots=True, eq=False)
class Attempt:
    """Owned by the dispatcher; the executor fills in what it opens.

    `delivered` is the text that earlier attempts have streamed to readers, and `resumed` the same
    in the engine's units: the end of this attempt's prompt. `opened`: the contexts it created, the
    one it generates on (`context`, which it pins) last. `is_longest`: no live engine takes longer
    sequences, so an output for which there is no room is cut, not sent elsewhere."""

    task: CompletionTask
    engine: Engine
    priority: int = 0
    is_longest: bool = True
    tokenizer: ModelTokenizer | None = None
    sampling: SamplingConfig = field(init=False)  # with the length that there is room for
    delivered: str = ""
    resumed: Units = ()
    context: Context | None = None
    opened: list[Context] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampling = self.task.completion.sampling


class Outcome(NamedTuple):
    """The whole text, and its ids if there are ids that stand for exactly this text. `num_units`:
    what the engine appended to the context."""

    text: str
    ids: Ids | None
    num_units: int
    response: GenerateResponse
