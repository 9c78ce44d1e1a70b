"""The life of requests and their jobs: accept, open, finish, fail and free."""

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
    """Accepts requests, opens their jobs in order, and ends each request exactly once.

    If a job fails, later jobs of its context fail with the same error. Forks that need the job's
    tokens fail with `NotFound`, so that the sender may build the context again."""

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
        """Accept or reject a request. Never raises: errors go to the sink."""
        try:
            self._accept(request, sink)
        except ParrotError as error:
            self._reject(request, sink, error)
        except Exception:
            logger.exception("request %d could not be accepted", request.request_id)
            self._reject(request, sink, EngineFailed("internal error of the engine"))

    def _accept(self, request: EngineRequest, sink: Sink) -> None:
        if len(self._requests) >= self._max_requests:
            raise QuotaExceeded(
                f"the engine has {len(self._requests)} requests, the most that max_requests allows"
            )
        self._limits.check(request, self._tree, self._queues)
        generation = self._generation(request)
        state = RequestState(request, sink, generation, self._clock.now())
        self._requests[request.request_id] = state
        last = len(request.pieces) - 1
        for index, piece in enumerate(request.pieces):
            context = self._tree.get(piece.context_id) or self._create(piece, request)
            own_generation = generation if index == last else None
            job_id = self._job_ids.next()
            job = Job(job_id, state, context, piece, own_generation, request.priority)
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
        """The unfinished outputs and their contexts. May be called from any thread."""
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
        """Priority inheritance: raise the priority of all jobs that the context waits for."""
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
        """Apply the pending forks whose parents have computed enough tokens.

        An applied fork may be the parent of another one, so this repeats until nothing changes."""
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
                return  # The parent's jobs will compute the rest.
            if (known := len(parent.token_ids)) < length:
                text = f"context {parent.context_id} has {known} tokens; cannot fork it at {length}"
                self._fail_on(context, NotFound(text, param="parent_len"))
                length = known
            elif (queue := self._queues.of(context)) and self._should_restore(parent, length):
                self._restore(parent, queue[0])
                return
        self._apply_fork(context, length)

    def _should_restore(self, parent: Context, length: int) -> bool:
        """Whether to compute evicted KV in the parent, where all forks share it.

        At least one block must be missing, and the parent must end less than one block after the
        fork."""
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
        """Open the context's first job, and finish jobs that have nothing to compute."""
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
        """Append the job's tokens to the context, and limit the length of the generation."""
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

    # -- finishing and failing ---------------------------------------------------------------

    def send_chunk(self, request: RequestState) -> None:
        """Send the newest part of a streamed output to the sink and the followers."""
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
        """Finish a running job, and open the next job of its context.

        The request is answered with its last job."""
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
        """Cancel a request. Its contexts keep their tokens. Unknown ids are ignored."""
        if (request := self._requests.get(request_id)) is not None:
            self.fail_all([request], Cancelled("the request was aborted"))

    def fail_job(self, job: Job, error: ParrotError) -> None:
        """Fail a job whose step failed, and drop the KV of its own blocks, which may be wrong."""
        self._tree.invalidate(job.context)
        self.fail_all([job.request], error)

    def fail_everything(self, error: ParrotError) -> None:
        self.fail_all(self._requests.values(), error)

    def fail_all(self, requests: Iterable[RequestState], error: ParrotError) -> None:
        """Fail requests, and all requests that depend on them."""
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
        """Free a temporary context, whose only job has ended."""
        if context.is_temporary and self._tree.get(context.context_id) is context:
            self._scheduler.idle.discard(context)
            self._tree.free(context)

    def _fail_on(self, context: Context, error: ParrotError) -> None:
        """Fail the requests that write to the context."""
        self.fail_all([job.request for job in self._queues.of(context) if not job.restores], error)

    def _dependent_requests(
        self, job: Job, reason: ParrotError
    ) -> list[tuple[RequestState, ParrotError]]:
        """Later requests of the job's context, and requests on forks that need its tokens."""
        if not job.piece.token_ids and job.generation is None:
            return []  # The job adds no tokens.
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
        """Fail all requests and free all contexts, children before parents."""
        self.free([context.context_id for context in reversed(list(self._tree))])

    def free(self, context_ids: Iterable[int]) -> int:
        """Cancel the requests that write to the contexts, and free the contexts.

        Forks of the contexts continue. Returns the number of freed tokens."""
        num_tokens = 0
        for context_id in context_ids:
            context = self._tree.get(context_id)
            if context is None:
                continue
            self._fail_on(context, Cancelled(f"context {context_id} was freed"))
            if context.is_temporary:
                continue  # `_fail_on` has freed it.
            for job in list(self._queues.of(context)):  # Jobs that restore the context for a fork.
                job.request.num_unfinished -= 1
                self._cancel_job(job)
            # Failing a fork may redirect the fork's own forks to this context.
            while forks := forks_of(self._tree, context):
                for child, fork in forks:
                    self._detach_fork(child, fork)
            self._scheduler.idle.discard(context)
            num_tokens += self._tree.free(context)
        return num_tokens

    def _detach_fork(self, child: Context, fork: Fork) -> None:
        """Apply or redirect the fork of a parent that will be freed.

        The child fails if the parent does not have enough tokens yet."""
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
    """The limits of all requests of an engine."""

    max_context_len: int  # Tokens of one context that fit the model and the KV pool.
    vocab_size: int

    def check(self, request: EngineRequest, tree: ContextTree, queues: ContextQueues) -> None:
        """Raise if a token, a parent or a length is invalid.

        Lengths that are not known yet, because a parent still generates, are checked when the job
        is opened."""
        sampling = request.sampling
        if sampling is not None and sampling.logit_bias:
            self._check_token(max(sampling.logit_bias), "logit_bias")
        num_top = request.num_scored if sampling is None else sampling.logprobs
        if (num_top or 0) > self.vocab_size:
            text = f"{num_top} exceeds the vocabulary of {self.vocab_size} tokens"
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
                text = (
                    f"public_len is {piece.public_len}, but the piece has only "
                    f"{len(piece.token_ids)} tokens"
                )
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
        """Raise `PromptTooLong` if the context, with one generated token, exceeds the limit."""
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
    """Raise `NotFound` for a context of another salt, because context ids can be guessed."""
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
    """The least number of tokens that the piece's context has before the piece."""
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
    """The pending forks of a context, in order of creation."""
    return [
        (c, c.fork) for c in tree.pending_forks if c.fork is not None and c.fork.parent is parent
    ]


def forks_awaiting(tree: ContextTree, job: Job) -> list[Context]:
    """The pending forks that need the tokens of the job."""
    forks = forks_of(tree, job.context)
    return [c for c, fork in forks if fork.after is not None and fork.after >= job.job_id]


def create_context(tree: ContextTree, queues: ContextQueues, piece: Piece, salt: str) -> Context:
    """Create the context of a piece. Its parent, if any, must exist."""
    if piece.parent_id == NO_PARENT:
        return tree.create(piece.context_id, salt=salt, public_len=piece.public_len)
    parent, length = tree.get(piece.parent_id), piece.parent_len
    assert parent is not None, f"context {piece.parent_id} vanished"
    fork = _fork_of_all(parent, queues.of(parent)) if length is None else Fork(parent, length, None)
    return tree.create(piece.context_id, fork)


def resolve_fork_lengths(tree: ContextTree, queues: ContextQueues, job: Job) -> None:
    """Update the forks that wait for a job which has left its context.

    Such a fork then waits for the job before it, or gets a fixed length."""
    for child, fork in forks_of(tree, job.context):
        if fork.after == job.job_id:
            before = [other for other in queues.of(job.context) if other.job_id < job.job_id]
            child.fork = _fork_of_all(job.context, before)


def _fork_of_all(parent: Context, jobs: Sequence[Job]) -> Fork:
    """A fork of all tokens that the parent has when its `jobs` have ended."""
    if jobs:
        return Fork(parent, None, jobs[-1].job_id)
    # A parent with a pending fork has no tokens. Its fork is the same fork.
    return parent.fork or Fork(parent, len(parent.token_ids), None)
