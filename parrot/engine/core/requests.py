"""From requests to open jobs and back: accepting, opening, ending, failing and freeing."""

import logging
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parrot.engine.config import EngineConfig
from parrot.engine.core.contexts import Context, ContextTree, Fork
from parrot.engine.core.jobs import (
    ContextQueues,
    EngineRequest,
    Job,
    Outbox,
    Piece,
    PromptTotals,
    RequestState,
    Sink,
)
from parrot.engine.core.output import Followers, Generation, Language
from parrot.engine.core.scheduler import LocalScheduler
from parrot.engine.core.steps import StepTotals
from parrot.protocol.engine_api import NO_PARENT
from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    NotFound,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
)
from parrot.utils.clock import Clock
from parrot.utils.ids import IdCounter

logger = logging.getLogger(__name__)


class RequestTable:
    """Accepts requests, opens their jobs when their turn comes, and ends each request once.

    Outcomes wait in the `outbox`. A job behind a failed one on the same context would run on
    the wrong tokens, so its request fails with the same error. A fork of what a failed job would
    have added fails with `NotFound`: its sender may build the context again."""

    def __init__(
        self,
        config: EngineConfig,
        tree: ContextTree,
        scheduler: LocalScheduler,
        language: Language,
        limits: "RequestLimits",
        clock: Clock,
        totals: StepTotals,
    ) -> None:
        self._max_requests = config.max_requests
        self._random_seed = config.random_seed
        self._tree = tree
        self._scheduler = scheduler
        self._language = language
        self._limits = limits
        self._clock = clock
        self._totals = totals
        self.outbox = Outbox()
        self.followers = Followers(self._generation_on, self.outbox.add)
        self.prompts = PromptTotals()
        self._requests: dict[int, RequestState] = {}
        self._queues = ContextQueues()
        self._job_ids = IdCounter()

    def __len__(self) -> int:
        return len(self._requests)

    # -- accepting ---------------------------------------------------------------------------

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Never raises: whatever keeps the request from running goes to its sink."""
        try:
            self._accept(request, sink)
        except ParrotError as error:
            self._reject(request, sink, error)
        except Exception:
            logger.exception("request %d could not be entered", request.request_id)
            self._reject(request, sink, EngineFailed("internal error of the engine"))

    def _accept(self, request: EngineRequest, sink: Sink) -> None:
        if len(self._requests) >= self._max_requests:
            raise QuotaExceeded(f"the engine already has {len(self._requests)} requests")
        self._limits.check(request, self._tree, self._queues)
        generation = self._generation(request)
        state = RequestState(request, sink, generation, self._clock.now())
        self._requests[request.request_id] = state
        last = len(request.pieces) - 1
        for index, piece in enumerate(request.pieces):
            context = self._tree.get(piece.context_id) or self._create(piece, request)
            job_id, ends = self._job_ids.next(), generation if index == last else None
            job = Job(job_id, state, context, piece, ends, request.priority)
            job.reading = request.reading()
            self._enqueue(job)
        if generation is not None and self.followers.by_context:
            self.followers.start(state.context_id, generation)
        share, contexts = request.share, dict.fromkeys([job.context for job in state.jobs])
        self._tree.shares.record_request(state.jobs[0].context.group, share.tenant, share.weight)
        for context in contexts:
            self._open_next(context)

    def _reject(self, request: EngineRequest, sink: Sink, error: ParrotError) -> None:
        if (state := self._requests.get(request.request_id)) is not None:
            self.fail_all([state], error)
        else:
            self.outbox.add(sink, error)

    def _generation(self, request: EngineRequest) -> Generation | None:
        if request.sampling is None:
            return None
        seed = request.sampling.seed
        if seed is None:
            seed = hash((self._random_seed, request.request_id)) & (2**63 - 1)
        return Generation(
            self._language.default_sampling.resolve(request.sampling),
            seed,
            self._language,
            request.stream,
            request.constraint,
            request.resumed_ids,
        )

    def generations(self) -> list[tuple[int, Generation]]:
        """The outputs under way, and their contexts. May be called from any thread."""
        return [(s.context_id, s.generation) for s in list(self._requests.values()) if s.generation]

    def _generation_on(self, context_id: int) -> Generation | None:
        context = self._tree.get(context_id)
        jobs = () if context is None else self._queues.of(context)
        return next((job.generation for job in jobs if job.generation is not None), None)

    def _create(self, piece: Piece, request: EngineRequest) -> Context:
        if request.reading() is not None:
            salt = request.cache_salt
            return self._tree.create(piece.context_id, salt=salt, is_temporary=True)
        return create_context(self._tree, self._queues, piece, request.cache_salt)

    def _enqueue(self, job: Job) -> None:
        job.request.jobs.append(job)
        job.request.num_unfinished += 1
        self._queues.add(job)
        self._raise_priority(job.context, job.priority)

    def _raise_priority(self, context: Context, priority: int) -> None:
        """Priority inheritance: what the context has to wait for becomes as urgent."""
        while True:
            for job in self._queues.of(context):
                if job.priority <= priority:
                    continue
                if job.is_open:
                    self._scheduler.reprioritise(job, priority)
                else:
                    job.priority = priority
            if context.fork is None:
                return
            context = context.fork.parent

    # -- opening -----------------------------------------------------------------------------

    def apply_ready_forks(self) -> None:
        """Carry out the forks whose parents have got far enough. One may let another follow."""
        pending, num_before = self._tree.pending_forks, -1
        while len(pending) != num_before:
            num_before = len(pending)
            for context in list(pending):
                if context.fork is not None:
                    self._try_fork(context, context.fork)

    def _try_fork(self, context: Context, fork: Fork) -> None:
        parent, length = fork.parent, fork.length
        if parent.fork is not None or length is None:
            return
        if parent.num_computed < length:
            if self._queues.of(parent):
                return  # it will get there
            if (known := len(parent.token_ids)) < length:
                text = f"context {parent.context_id} ended at {known} tokens, before {length}"
                self._fail_on(context, NotFound(text, param="parent_len"))
                length = known
            elif (queue := self._queues.of(context)) and self._should_restore(parent, length):
                self._restore(parent, queue[0])
                return
        self._apply_fork(context, length)

    def _should_restore(self, parent: Context, length: int) -> bool:
        """Whether KV that the parent lost is worth computing in the parent, where every fork
        shares it: a block or more, and not much beyond the fork."""
        block_size = self._tree.block_size
        is_worth = length - parent.num_computed >= block_size
        return is_worth and len(parent.token_ids) - length < block_size

    def _restore(self, parent: Context, requester: Job) -> None:
        piece = Piece(parent.context_id, array("i"))
        job_id, state = self._job_ids.next(), requester.request
        self._enqueue(Job(job_id, state, parent, piece, None, requester.priority, restores=True))
        self._open_next(parent)

    def _apply_fork(self, context: Context, length: int) -> None:
        self._tree.apply_fork(context, length)
        self._open_next(context)

    def _open_next(self, context: Context) -> None:
        """Open the first job of the context's queue if it is not; end those with nothing to do."""
        if context.fork is not None:
            return
        while queue := self._queues.of(context):
            job = queue[0]
            if job.is_open:
                return
            try:
                self._open(job)
            except ParrotError as error:
                self.fail_all([job.request], error)
                continue
            if context.num_missing:
                self._scheduler.add(job)
                return
            self._finish_job(job)
        self._scheduler.idle.add(context)

    def _open(self, job: Job) -> None:
        """Append the job's tokens to its context and settle how far it can generate."""
        context, piece, generation = job.context, job.piece, job.generation
        num_before = len(context.token_ids)
        first = () if piece.first_id is None or num_before else (piece.first_id,)
        length = num_before + len(first) + len(piece.token_ids)
        self._limits.check_length(length, generation is not None)
        if not length and (generation is not None or job.reading is not None):
            raise InvalidRequest("the context is empty")
        context.token_ids.extend(first)
        context.token_ids.extend(piece.token_ids)
        job.is_open = True
        request = job.request
        request.num_filled += length - num_before
        job.count_missing()
        request.prompt_len = length
        if generation is not None:
            generation.max_tokens = min(
                generation.max_tokens, self._limits.max_context_len - length
            )
            if not context.num_missing:
                self._tree.rewind_one(context)

    # -- ending ------------------------------------------------------------------------------

    def send_chunk(self, request: RequestState) -> None:
        """Send what its output has grown by to those who take it as it comes."""
        generation = request.generation
        if generation is None or not generation.is_streamed:
            return
        if (chunk := generation.take_chunk()) is None:
            return
        if request.params.stream:
            self.outbox.add(request.sink, chunk)
        if self.followers.by_context:
            self.followers.send(request.context_id, chunk)

    def finish(self, job: Job) -> None:
        """A running job has all it wanted: answer if it was its request's last, open the next."""
        self._scheduler.remove(job)
        self._tree.publish(job.context)
        self._finish_job(job)
        self._open_next(job.context)
        self._free_temporary(job.context)

    def _finish_job(self, job: Job) -> None:
        self._remove_from_queue(job)
        request = job.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._close(request)
            self.prompts.add(request)
            response = request.response(self._clock.now(), self._totals)
            self.outbox.add(request.sink, response)

    def _remove_from_queue(self, job: Job) -> None:
        job.has_ended = True
        self._queues.remove(job)
        resolve_fork_lengths(self._tree, self._queues, job)

    def _close(self, request: RequestState) -> None:
        request.has_ended = True
        del self._requests[request.params.request_id]
        if request.generation is not None and self.followers.by_context:
            self.followers.send(request.context_id, None)

    def abort(self, request_id: int) -> None:
        """The sender is no longer interested; its contexts stay as they are. Unknown ids are
        requests that ended meanwhile."""
        if (request := self._requests.get(request_id)) is not None:
            self.fail_all([request], Cancelled("the request was aborted"))

    def fail_job(self, job: Job, error: ParrotError) -> None:
        """A step went wrong for this job: what it left in its own blocks is not to be trusted."""
        self._tree.invalidate(job.context)
        self.fail_all([job.request], error)

    def fail_everything(self, error: ParrotError) -> None:
        self.fail_all(self._requests.values(), error)

    def fail_all(self, requests: Iterable[RequestState], error: ParrotError) -> None:
        """Fail these requests, and those that cannot succeed without them."""
        failing = deque((request, error) for request in requests)
        touched: dict[Context, None] = {}
        while failing:
            request, reason = failing.popleft()
            if request.has_ended:
                continue
            self._close(request)
            self.outbox.add(request.sink, reason)
            for job in request.jobs:
                if not job.has_ended:
                    failing += self._dependent_requests(job, reason)
                    touched[job.context] = None
                    self._cancel_job(job)
        for context in touched:
            self._open_next(context)
            self._free_temporary(context)

    def _free_temporary(self, context: Context) -> None:
        """Forget the context if it was its job's alone, which has ended."""
        if context.is_temporary and self._tree.get(context.context_id) is context:
            self._scheduler.idle.discard(context)
            self._tree.free(context)

    def _fail_on(self, context: Context, error: ParrotError) -> None:
        """Fail the requests that write to the context."""
        self.fail_all([job.request for job in self._queues.of(context) if not job.restores], error)

    def _dependent_requests(
        self, job: Job, reason: ParrotError
    ) -> list[tuple[RequestState, ParrotError]]:
        """Requests later in the job's queue, and on forks that want what it would have added."""
        if not job.piece.token_ids and job.generation is None:
            return []  # it would have added nothing
        queue, context_id = self._queues.of(job.context), job.context.context_id
        lost = NotFound(f"context {context_id} was not completed: {reason.message}")
        return [(other.request, reason) for other in queue[queue.index(job) + 1 :]] + [
            (other.request, lost)
            for child in forks_awaiting(self._tree, job)
            for other in self._queues.of(child)
        ]

    def _cancel_job(self, job: Job) -> None:
        self._remove_from_queue(job)
        if job.is_open:
            self._scheduler.remove(job)

    # -- freeing -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Fail every request and forget every context, children before their parents."""
        self.free([context.context_id for context in reversed(list(self._tree))])

    def free(self, context_ids: Iterable[int]) -> int:
        """Abort the requests that write to these contexts and forget them; their forks go on.
        Returns the tokens that they held."""
        num_tokens = 0
        for context_id in context_ids:
            context = self._tree.get(context_id)
            if context is None:
                continue
            self._fail_on(context, Cancelled(f"context {context_id} was freed"))
            if context.is_temporary:
                continue  # it went with its job
            for job in list(self._queues.of(context)):  # that restore it for a fork
                job.request.num_unfinished -= 1
                self._cancel_job(job)
            while forks := forks_of(self._tree, context):  # failing one gives its own to this
                for child, fork in forks:
                    self._detach_fork(child, fork)
            self._scheduler.idle.discard(context)
            num_tokens += self._tree.free(context)
        return num_tokens

    def _detach_fork(self, child: Context, fork: Fork) -> None:
        """The parent is about to be forgotten: the child takes what it wants of it now, or fails if
        the parent has not got that far."""
        parent, length = fork.parent, fork.length
        if length is None or length > parent.num_known:
            text = f"context {parent.context_id} was freed before it could be forked"
            self._fail_on(child, NotFound(text, param="parent_context_id"))
            length = parent.num_known
        if parent.fork is None:
            self._apply_fork(child, length)
        else:
            child.fork = Fork(parent.fork.parent, length, None)

    def check_integrity(self) -> None:
        num_open = 0
        for context in self._tree:
            queue = self._queues.of(context)
            assert queue or not context.block_ids or context in self._scheduler.idle, context
            for index, job in enumerate(queue):
                assert job.context is context, job
                assert job.is_open == (index == 0 and context.fork is None), job
                assert not job.request.has_ended, job
                num_open += job.is_open
        assert num_open == self._scheduler.num_jobs, (num_open, self._scheduler.num_jobs)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """`max_context_len`: tokens of one context that fit both the model and the KV pool."""

    max_context_len: int
    vocab_size: int

    def check(self, request: EngineRequest, tree: ContextTree, queues: ContextQueues) -> None:
        """Raise if a token, a parent or a length is already known to be impossible. What is not
        known yet (a parent still generates) is checked when the job opens."""
        sampling = request.sampling
        if sampling is not None and sampling.logit_bias:
            self._check_token(max(sampling.logit_bias), "logit_bias")
        num_top = request.num_scored if sampling is None else sampling.logprobs
        if (num_top or 0) > self.vocab_size:
            text = f"there are {self.vocab_size} tokens, not {num_top}"
            raise InvalidRequest(text, param="logprobs")
        for ids in request.drafts.texts:
            self._check_token(max(ids, default=0), "drafts")
        lengths: dict[int, int] = {}
        creators: dict[int, Piece] = {}
        last = len(request.pieces) - 1
        for index, piece in enumerate(request.pieces):
            if piece.token_ids:
                self._check_token(max(piece.token_ids), "token_ids")
            if piece.public_len > len(piece.token_ids):
                text = f"{piece.public_len} of {len(piece.token_ids)} tokens cannot be public"
                raise InvalidRequest(text, param="public_len")
            if (context := tree.get(piece.context_id)) is None:
                _check_fork(piece, creators.setdefault(piece.context_id, piece))
                _check_salt(tree.get(piece.parent_id), request, "parent_context_id")
            else:
                _check_salt(context, request, "context_id")
            length = _length_before(piece, lengths, tree, queues) + len(piece.token_ids)
            self.check_length(length, request.sampling is not None and index == last)
            lengths[piece.context_id] = length

    def check_length(self, length: int, generates: bool) -> None:
        """Raise `PromptTooLong` if a context of that length, and one generated token, cannot be."""
        if length + generates > self.max_context_len:
            raise PromptTooLong(
                f"a context of {length} tokens does not fit this engine: at most "
                f"{self.max_context_len}, with the first generated token"
            )

    def _check_token(self, token_id: int, param: str) -> None:
        if token_id >= self.vocab_size:
            text = f"token id {token_id} is outside of the vocabulary of {self.vocab_size}"
            raise InvalidRequest(text, param=param)


def _check_salt(context: Context | None, request: EngineRequest, param: str) -> None:
    """Ids are easily guessed: what others have is to the request as if it did not exist."""
    if context is not None and context.salt != request.cache_salt:
        raise NotFound(f"no context {context.context_id} of this salt", param=param)


def _check_fork(piece: Piece, creator: Piece) -> None:
    if not piece.repeats_fork(creator):
        raise InvalidRequest(
            f"context {piece.context_id} cannot be forked from context {piece.parent_id}: an "
            "earlier piece of the request creates it otherwise",
            param="parent_context_id",
        )


def _length_before(
    piece: Piece, lengths: dict[int, int], tree: ContextTree, queues: ContextQueues
) -> int:
    """Tokens that the piece's context will have at least, before the piece."""
    if (length := _length_of(piece.context_id, lengths, tree, queues)) is not None:
        return length
    if piece.parent_id == NO_PARENT:
        return 0
    parent_length = _length_of(piece.parent_id, lengths, tree, queues)
    if parent_length is None:
        raise NotFound(f"no context {piece.parent_id} to fork from", param="parent_context_id")
    if piece.parent_len is None:
        return parent_length
    parent = tree.get(piece.parent_id)
    may_grow = parent is None or queues.of(parent) or (parent.fork and parent.fork.length is None)
    if parent_length < piece.parent_len and not may_grow:
        raise NotFound(
            f"context {piece.parent_id} has {parent_length} tokens, cannot fork it at "
            f"{piece.parent_len}",
            param="parent_len",
        )
    return piece.parent_len


def _length_of(
    context_id: int, lengths: dict[int, int], tree: ContextTree, queues: ContextQueues
) -> int | None:
    if context_id in lengths:
        return lengths[context_id]
    context = tree.get(context_id)
    if context is None:
        return None
    added = sum(len(job.piece.token_ids) for job in queues.of(context) if not job.is_open)
    return context.num_known + added


def forks_of(tree: ContextTree, parent: Context) -> list[tuple[Context, Fork]]:
    """The forks of a context that have not been carried out, in order of their creation."""
    return [
        (c, c.fork) for c in tree.pending_forks if c.fork is not None and c.fork.parent is parent
    ]


def forks_awaiting(tree: ContextTree, job: Job) -> list[Context]:
    """The forks that want all tokens of the job's context, those of the job included."""
    forks = forks_of(tree, job.context)
    return [c for c, fork in forks if fork.after is not None and fork.after >= job.job_id]


def create_context(tree: ContextTree, queues: ContextQueues, piece: Piece, salt: str) -> Context:
    """Create the context of a piece whose parent, if it has one, exists."""
    if piece.parent_id == NO_PARENT:
        return tree.create(piece.context_id, salt=salt, public_len=piece.public_len)
    parent, length = tree.get(piece.parent_id), piece.parent_len
    assert parent is not None, f"context {piece.parent_id} vanished"
    fork = _fork_of_all(parent, queues.of(parent)) if length is None else Fork(parent, length, None)
    return tree.create(piece.context_id, fork)


def resolve_fork_lengths(tree: ContextTree, queues: ContextQueues, job: Job) -> None:
    """The job has left its context: forks that want all tokens up to its end now want those up to
    the end of the job before it, or know how many there are."""
    for child, fork in forks_of(tree, job.context):
        if fork.after == job.job_id:
            before = [other for other in queues.of(job.context) if other.job_id < job.job_id]
            child.fork = _fork_of_all(job.context, before)


def _fork_of_all(parent: Context, jobs: Sequence[Job]) -> Fork:
    """A fork of all that the parent has once these jobs of it have ended."""
    if jobs:
        return Fork(parent, None, jobs[-1].job_id)
    # If it has no tokens yet, since it waits for its own fork, this is the same fork again.
    return parent.fork or Fork(parent, len(parent.token_ids), None)
