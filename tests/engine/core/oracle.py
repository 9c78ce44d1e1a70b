"""The expected answers of an engine, computed from the requests alone.

A context with one writing request has a known text: the prefix of its parent, the pieces of the
request, and the output of the model. So the oracle knows each `filled_len` and each token without
any knowledge of steps. For a context with several writers it knows bounds only. Each error must
have a reason in the history of the request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parrot.engine.core.contexts import Context
from parrot.engine.core.jobs import BACKGROUND, Outcome, Piece
from parrot.engine.sim import EOS_ID
from parrot.protocol.engine_api import (
    NO_PARENT,
    FillResponse,
    FinishReason,
    GenerateResponse,
    StreamChunk,
)
from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    ParrotError,
    PromptTooLong,
)
from parrot.protocol.sampling import SamplingConfig

Text = list[int]


@dataclass(eq=False)
class Asked:
    """A request and the sink for its answer. `due`: errors that have a reason now."""

    oracle: "Oracle" = field(repr=False)
    pieces: Sequence[Piece]
    sampling: SamplingConfig | None
    priority: int
    contexts: "dict[int, Known]" = field(default_factory=dict, repr=False)
    due: set[type[ParrotError]] = field(default_factory=set)
    chunks: list[StreamChunk] = field(default_factory=list)
    answer: FillResponse | GenerateResponse | ParrotError | None = None

    def __call__(self, outcome: Outcome) -> None:
        assert self.answer is None
        if isinstance(outcome, StreamChunk):
            self.chunks.append(outcome)
            return
        if isinstance(outcome, ParrotError):
            self.oracle.check_error(self, outcome)
        else:
            self.oracle.check_response(self, outcome)
        self.answer = outcome


@dataclass(eq=False)
class Known:
    """A context, and all requests that ever wrote to it."""

    parent: "Known | None" = None
    length: int | None = None  # Tokens of the parent; None: its first `num_inherited` pieces.
    num_inherited: int = 0
    num_pieces: int = 0  # Pieces that all `writers` have added.
    writers: list[Asked] = field(default_factory=list)
    context: Context | None = None

    @property
    def is_exact(self) -> bool:
        """Whether one request determines all tokens of the context."""
        if len(self.writers) != 1 or self.parent is None or self.length is not None:
            return len(self.writers) == 1
        return self.parent.is_exact and self.parent.num_pieces == self.num_inherited

    @property
    def is_short(self) -> bool:
        """Whether the parent has fewer tokens than the fork needs.

        While the parent has a pending fork and no writer, a fork of all of it is the same fork."""
        if self.parent is None:
            return False
        if self.length is None:
            return self.parent.is_short
        return len(self.parent.held()) < self.length

    def may_fork(self, other: "Known") -> bool:
        if self.parent is None or self.parent is other:
            return self.parent is other
        return self.length is None and self.parent.may_fork(other)

    def held(self) -> Text:
        """The context's tokens so far. A freed context keeps its tokens."""
        if self.context is None:
            return []
        if self.context.fork is None or self.parent is None:
            return list(self.context.token_ids)
        return self.parent.held()[: self.context.fork.length]

    def most(self) -> int:
        """The largest possible number of tokens, after all writers have ended."""
        inherited = 0
        if self.parent is not None:
            inherited = self.parent.most() if self.length is None else self.length
        added = sum(
            sum(len(p.token_ids) + 1 for p in w.pieces) + (w.sampling or _NOTHING).max_gen_length
            for w in self.writers
        )
        return inherited + added


_NOTHING = SamplingConfig(max_gen_length=1)


class Oracle:
    """`bad_tokens` make a step fail. `find` returns a context of the engine."""

    def __init__(
        self,
        find: Callable[[int], Context | None],
        next_token: Callable[[Sequence[int]], int],
        max_len: int,
        bad_tokens: Sequence[int],
    ) -> None:
        self._find = find
        self._next_token = next_token
        self._max_len = max_len
        self._bad_tokens = frozenset(bad_tokens)
        self._known: dict[int, Known] = {}
        self._all: list[Known] = []

    # -- events ------------------------------------------------------------------------------

    def asks(
        self, pieces: Sequence[Piece], sampling: SamplingConfig | None, priority: int
    ) -> Asked:
        """Record a request before it is sent, and the contexts that it will create."""
        asked = Asked(self, pieces, sampling, priority)
        for piece in pieces:
            known = self._known.get(piece.context_id)
            if known is None:
                parent = self._known.get(piece.parent_id)
                if parent is None and piece.parent_id != NO_PARENT:
                    asked.due = {NotFound}
                    return asked
                num_pieces = 0 if parent is None else parent.num_pieces
                known = Known(parent, piece.parent_len, num_pieces)
                self._known[piece.context_id] = known
                self._all.append(known)
            known.num_pieces += 1
            if asked not in known.writers:
                known.writers.append(asked)
            asked.contexts[piece.context_id] = known
        return asked

    def was_asked(self, asked: Asked) -> None:
        """Record a request after it was sent.

        A rejected request leaves no context. A request that continues a background fill raises the
        priority of the fill."""
        assert asked.answer is not None or NotFound not in asked.due
        for context_id, known in asked.contexts.items():
            if known.context is None:
                known.context = self._find(context_id)
                if known.context is None:
                    assert isinstance(asked.answer, ParrotError)
                    del self._known[context_id]
            if asked.answer is None and asked.priority < BACKGROUND:
                for writer in known.writers:
                    writer.priority = min(writer.priority, asked.priority)

    def aborts(self, asked: Asked) -> None:
        asked.due.add(Cancelled)

    def frees(self, context_ids: Sequence[int]) -> None:
        for context_id in context_ids:
            if (known := self._known.pop(context_id, None)) is not None:
                for writer in known.writers:
                    writer.due.add(Cancelled)
                self._lose(known)

    def _lose(self, parent: Known) -> None:
        """Forks that need later tokens of this context may now fail."""
        for known in self._all:
            if known.may_fork(parent):
                for writer in known.writers:
                    writer.due.add(NotFound)

    # -- answers -----------------------------------------------------------------------------

    def check_error(self, asked: Asked, error: ParrotError) -> None:
        assert self._is_due(asked, error), f"{error!r} is not due: {asked}"
        for known in asked.contexts.values():
            for later in known.writers[known.writers.index(asked) + 1 :]:
                later.due.add(type(error))
            self._lose(known)

    def _is_due(self, asked: Asked, error: ParrotError) -> bool:
        wanted = asked.contexts.values()
        match error:
            case _ if type(error) in asked.due:
                return True
            case PromptTooLong():
                return any(known.most() > self._max_len for known in wanted)
            case InvalidRequest():
                return asked.sampling is not None and not self._last(asked).held()
            case NotFound():
                return any(known.is_short for known in wanted)
            case OutOfMemory():
                return asked.priority == BACKGROUND
            case EngineFailed() if "a step with" in str(error):
                return bool(
                    self._bad_tokens
                )  # A failed step has written to a block that it copied.
            case EngineFailed():
                return any(self._bad_tokens.intersection(known.held()) for known in wanted)
        return False

    def check_response(self, asked: Asked, response: FillResponse | GenerateResponse) -> None:
        num_filled, num_uncertain = 0, 0
        for context_id, known in asked.contexts.items():
            text = self._prefix(known) if known.is_exact else []
            num_before = len(text)
            for piece in asked.pieces:
                if piece.context_id != context_id:
                    continue
                if piece.first_id is not None and not text:
                    text.append(piece.first_id)
                    num_uncertain += not known.is_exact
                text += piece.token_ids
            num_filled += len(text) - num_before
            if isinstance(response, GenerateResponse) and known is self._last(asked):
                is_freed = self._known.get(context_id) is not known
                # It may end before another context of its request does, and be freed then.
                assert not is_freed or len(asked.contexts) > 1, "its context was freed"
                if known.is_exact:
                    self._check_output(asked, text, response)
                text += response.generated_ids
            if known.is_exact:
                assert known.held() == text
        if isinstance(response, FillResponse):
            assert num_filled - num_uncertain <= response.filled_len <= num_filled

    @staticmethod
    def _last(asked: Asked) -> Known:
        return asked.contexts[asked.pieces[-1].context_id]

    def _prefix(self, known: Known) -> Text:
        if known.parent is None:
            return []
        prefix = known.parent.held()[: known.length]
        assert known.length in (None, len(prefix)), "it was forked of nothing"
        return prefix

    def _check_output(self, asked: Asked, prompt: Text, response: GenerateResponse) -> None:
        assert not self._bad_tokens.intersection(prompt), "it should have failed"
        assert asked.sampling is not None
        ids, text, reason = self._continue(prompt, asked.sampling)
        assert response.generated_ids == ids
        assert response.generated_text == text
        assert response.finish_reason is reason
        assert response.usage.output_tokens == len(ids)
        if asked.chunks:
            assert [i for chunk in asked.chunks for i in chunk.ids] == ids
            assert "".join(chunk.text for chunk in asked.chunks) == text

    def _continue(self, prompt: Text, sampling: SamplingConfig) -> tuple[Text, str, FinishReason]:
        assert prompt, "nothing to generate from"
        ids: Text = []
        text = ""
        for _ in range(min(sampling.max_gen_length, self._max_len - len(prompt))):
            ids.append(self._next_token(prompt + ids))
            if ids[-1] == EOS_ID:
                return ids, text, FinishReason.STOP
            text += chr(ids[-1])
            if hits := [at for stop in sampling.stop_strings if (at := text.find(stop)) >= 0]:
                return ids, text[: min(hits)], FinishReason.STOP
        return ids, text, FinishReason.LENGTH
