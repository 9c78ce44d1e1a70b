"""Draft texts for speculative decoding: predictions of the caller, and earlier outputs."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parrot.protocol.engine_api import MAX_DRAFT_TOKENS, DraftSources, Usage
from parrot.serve.execution.run import Attempt, Outcome
from parrot.serve.graph.nodes import Completion, VariablePiece
from parrot.serve.prompts.encode import encode_text
from parrot.serve.scheduling.task import function_key
from parrot.utils.heaps import LruDict

_MAX_FUNCTIONS = 1024  # Number of functions with kept outputs; the least recent are forgotten.
_KEPT_OUTPUTS = 4  # Number of outputs kept per function.
_SENT_OUTPUTS = 2  # Number of kept outputs sent with one request.
_MAX_OUTPUT_TOKENS = 4096  # Number of tokens kept of one output; later ones are cut off.
# Drafted tokens of a function after which its acceptance rate counts.
_MIN_DRAFTED = 256.0
# Drafted tokens of a function at which its counts are halved. A larger value adapts more slowly.
_HALVING_TOKENS = 2048.0
_MIN_ACCEPTANCE = 0.1  # Functions with a smaller fraction of accepted tokens are not drafted.
_PROBE_INTERVAL = 16  # Of a function that is not drafted, one in this number of calls still is.

_NO_DRAFTS = DraftSources(in_context=False)


class _Output(NamedTuple):
    session_id: int
    tokenizer_id: str
    ids: "array[int]"


@dataclass(slots=True)
class _Function:
    """The kept outputs and the acceptance rate of one function."""

    # The newest output is the last.
    outputs: deque[_Output] = field(default_factory=lambda: deque(maxlen=_KEPT_OUTPUTS))
    drafted: float = 0.0
    accepted: float = 0.0
    num_skipped: int = 0

    def count(self, usage: Usage) -> None:
        if self.drafted > _HALVING_TOKENS:
            self.drafted, self.accepted = self.drafted / 2, self.accepted / 2
        self.drafted += usage.drafted_tokens
        self.accepted += usage.accepted_tokens

    def should_draft(self) -> bool:
        if self.drafted < _MIN_DRAFTED or self.accepted >= _MIN_ACCEPTANCE * self.drafted:
            return True
        self.num_skipped += 1
        return self.num_skipped % _PROBE_INTERVAL == 0

    def texts(self, session_id: int, tokenizer_id: str) -> list[list[int]]:
        """The newest outputs, with this session's outputs first. They include the outputs of
        parallel calls to the same function."""
        usable = [o for o in reversed(self.outputs) if o.tokenizer_id == tokenizer_id]
        usable.sort(key=lambda output: output.session_id != session_id)
        return [output.ids.tolist() for output in usable[:_SENT_OUTPUTS]]


class DraftTexts:
    """Keeps the last outputs of each function and cache salt, and the acceptance of their drafts.

    Only functions with input variables count: the others are shared as cached results."""

    def __init__(self) -> None:
        self._functions: LruDict[int, _Function] = LruDict(_MAX_FUNCTIONS)

    async def sources(self, attempt: Attempt) -> DraftSources | None:
        """The draft texts for an attempt. None if there are none; the engine may still draft from
        the output's own context."""
        completion, tokenizer = attempt.task.completion, attempt.tokenizer
        if tokenizer is None or not attempt.engine.uses_drafts:
            return None
        function = self._functions.get(function_key(completion))
        if function is not None and not function.should_draft():
            return _NO_DRAFTS
        texts: list[Sequence[int]] = []
        if prediction := completion.options.prediction:
            units = await encode_text(prediction, tokenizer)
            texts.append([unit for unit in units if isinstance(unit, int)])
        if function is not None:
            texts += function.texts(completion.session_id, tokenizer.tokenizer_id)
        room = MAX_DRAFT_TOKENS
        cut: list[list[int]] = []
        for text in texts:
            cut.append(list(text[:room]))
            room -= len(cut[-1])
        return DraftSources.model_construct(texts=tuple(cut)) if any(cut) else None

    def learn(self, completion: Completion, outcome: Outcome) -> None:
        """Keep the output of a call, and count its drafted and accepted tokens."""
        if outcome.tokenized is None or not _has_variables(completion):
            return
        key = function_key(completion)
        if (function := self._functions.get(key)) is None:
            self._functions.put(key, function := _Function())
        function.count(outcome.response.usage)
        ids = array("i", outcome.tokenized.ids[:_MAX_OUTPUT_TOKENS])
        function.outputs.append(_Output(completion.session_id, outcome.tokenized.tokenizer_id, ids))


def _has_variables(completion: Completion) -> bool:
    return any(isinstance(piece, VariablePiece) for piece in completion.fill)
