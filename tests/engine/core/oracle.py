"""The expected answers of an engine, computed from the requests alone.

A context with one writing request has known tokens: the prefix of its parent, the pieces of the
request, and the output of the model. So the oracle knows each `filled_len` and each token without
simulating steps. For a context with several writers, the oracle knows only bounds. Each error must
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
class TrackedRequest:
    """A request and the sink for its answer. `allowed_errors` are the errors with a reason so
    far."""

    oracle: "Oracle" = field(repr=False)
    pieces: Sequence[Piece]
    sampling: SamplingConfig | None
    priority: int
    contexts: "dict[int, TrackedContext]" = field(default_factory=dict, repr=False)
    allowed_errors: set[type[ParrotError]] = field(default_factory=set)
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
class TrackedContext:
    """A context, and all requests that have written to it."""

    parent: "TrackedContext | None" = None
    length: int | None = None  # Tokens of the parent. None: its first `num_inherited` pieces.
    num_inherited: int = 0
    num_pieces: int = 0  # Number of pieces from all `writers`.
    writers: list[TrackedRequest] = field(default_factory=list)
    context: Context | None = None

    @property
    def is_exact(self) -> bool:
        """Whether one request determines all tokens of the context."""
        if len(self.writers) != 1 or self.parent is None or self.length is not None:
            return len(self.writers) == 1
        return self.parent.is_exact and self.parent.num_pieces == self.num_inherited

    @property
    def has_short_parent(self) -> bool:
        """Whether the parent has fewer tokens than the fork needs.

        A fork of a whole parent that is itself a pending fork without a writer forks the same
        tokens."""
        if self.parent is None:
            return False
        if self.length is None:
            return self.parent.has_short_parent
        return len(self.parent.tokens()) < self.length

    def may_fork(self, other: "TrackedContext") -> bool:
        if self.parent is None or self.parent is other:
            return self.parent is other
        return self.length is None and self.parent.may_fork(other)

    def tokens(self) -> Text:
        """The context's tokens so far. A freed context keeps its tokens."""
        if self.context is None:
            return []
        if self.context.fork is None or self.parent is None:
            return list(self.context.token_ids)
        return self.parent.tokens()[: self.context.fork.length]

    def max_tokens(self) -> int:
        """The largest possible number of tokens after all writers have finished."""
        inherited = 0
        if self.parent is not None:
            inherited = self.parent.max_tokens() if self.length is None else self.length
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
        self._contexts: dict[int, TrackedContext] = {}
        self._all: list[TrackedContext] = []

    # -- events ------------------------------------------------------------------------------

    def record(
        self, pieces: Sequence[Piece], sampling: SamplingConfig | None, priority: int
    ) -> TrackedRequest:
        """Record a request before it is sent, with the contexts that it will create."""
        request = TrackedRequest(self, pieces, sampling, priority)
        for piece in pieces:
            tracked = self._contexts.get(piece.context_id)
            if tracked is None:
                parent = self._contexts.get(piece.parent_id)
                if parent is None and piece.parent_id != NO_PARENT:
                    request.allowed_errors = {NotFound}
                    return request
                num_pieces = 0 if parent is None else parent.num_pieces
                tracked = TrackedContext(parent, piece.parent_len, num_pieces)
                self._contexts[piece.context_id] = tracked
                self._all.append(tracked)
            tracked.num_pieces += 1
            if request not in tracked.writers:
                tracked.writers.append(request)
            request.contexts[piece.context_id] = tracked
        return request

    def confirm(self, request: TrackedRequest) -> None:
        """Record a request after it was sent.

        A rejected request leaves no context. A request that continues a background fill raises the
        priority of the fill."""
        assert request.answer is not None or NotFound not in request.allowed_errors
        for context_id, tracked in request.contexts.items():
            if tracked.context is None:
                tracked.context = self._find(context_id)
                if tracked.context is None:
                    assert isinstance(request.answer, ParrotError)
                    del self._contexts[context_id]
            if request.answer is None and request.priority < BACKGROUND:
                for writer in tracked.writers:
                    writer.priority = min(writer.priority, request.priority)

    def record_abort(self, request: TrackedRequest) -> None:
        request.allowed_errors.add(Cancelled)

    def record_free(self, context_ids: Sequence[int]) -> None:
        for context_id in context_ids:
            if (tracked := self._contexts.pop(context_id, None)) is not None:
                for writer in tracked.writers:
                    writer.allowed_errors.add(Cancelled)
                self._allow_not_found(tracked)

    def _allow_not_found(self, parent: TrackedContext) -> None:
        """Forks that need later tokens of this context may now fail."""
        for tracked in self._all:
            if tracked.may_fork(parent):
                for writer in tracked.writers:
                    writer.allowed_errors.add(NotFound)

    # -- answers -----------------------------------------------------------------------------

    def check_error(self, request: TrackedRequest, error: ParrotError) -> None:
        assert self._is_allowed(request, error), f"{error!r} has no reason: {request}"
        for tracked in request.contexts.values():
            for later in tracked.writers[tracked.writers.index(request) + 1 :]:
                later.allowed_errors.add(type(error))
            self._allow_not_found(tracked)

    def _is_allowed(self, request: TrackedRequest, error: ParrotError) -> bool:
        wanted = request.contexts.values()
        match error:
            case _ if type(error) in request.allowed_errors:
                return True
            case PromptTooLong():
                return any(tracked.max_tokens() > self._max_len for tracked in wanted)
            case InvalidRequest():
                return request.sampling is not None and not self._last(request).tokens()
            case NotFound():
                return any(tracked.has_short_parent for tracked in wanted)
            case OutOfMemory():
                return request.priority == BACKGROUND
            case EngineFailed() if "a step with" in str(error):
                return bool(
                    self._bad_tokens
                )  # A failed step may have written to a block that it copied.
            case EngineFailed():
                return any(self._bad_tokens.intersection(tracked.tokens()) for tracked in wanted)
        return False

    def check_response(
        self, request: TrackedRequest, response: FillResponse | GenerateResponse
    ) -> None:
        num_filled, num_uncertain = 0, 0
        for context_id, tracked in request.contexts.items():
            text = self._prefix(tracked) if tracked.is_exact else []
            num_before = len(text)
            for piece in request.pieces:
                if piece.context_id != context_id:
                    continue
                if piece.first_id is not None and not text:
                    text.append(piece.first_id)
                    num_uncertain += not tracked.is_exact
                text += piece.token_ids
            num_filled += len(text) - num_before
            if isinstance(response, GenerateResponse) and tracked is self._last(request):
                is_freed = self._contexts.get(context_id) is not tracked
                # This context may finish before another context of the request, and may be freed
                # then.
                assert not is_freed or len(request.contexts) > 1, (
                    "the context of an answer was freed"
                )
                if tracked.is_exact:
                    self._check_output(request, text, response)
                text += response.generated_ids
            if tracked.is_exact:
                assert tracked.tokens() == text
        if isinstance(response, FillResponse):
            assert num_filled - num_uncertain <= response.filled_len <= num_filled

    @staticmethod
    def _last(request: TrackedRequest) -> TrackedContext:
        return request.contexts[request.pieces[-1].context_id]

    def _prefix(self, tracked: TrackedContext) -> Text:
        if tracked.parent is None:
            return []
        prefix = tracked.parent.tokens()[: tracked.length]
        assert tracked.length in (None, len(prefix)), "the parent has fewer tokens than the fork"
        return prefix

    def _check_output(
        self, request: TrackedRequest, prompt: Text, response: GenerateResponse
    ) -> None:
        assert not self._bad_tokens.intersection(prompt), "a request with a bad token must fail"
        assert request.sampling is not None
        ids, text, reason = self._continue(prompt, request.sampling)
        assert response.generated_ids == ids
        assert response.generated_text == text
        assert response.finish_reason is reason
        assert response.usage.output_tokens == len(ids)
        if request.chunks:
            assert [i for chunk in request.chunks for i in chunk.ids] == ids
            assert "".join(chunk.text for chunk in request.chunks) == text

    def _continue(self, prompt: Text, sampling: SamplingConfig) -> tuple[Text, str, FinishReason]:
        assert prompt, "a request without a prompt must fail"
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
