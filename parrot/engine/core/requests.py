"""From requests to open jobs and back: lines per context, forks, failures, answers."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from parrot.engine.core.contexts import Context, ContextTree, Fork
from parrot.engine.core.jobs import EngineRequest, Job, JobLines, Piece, RequestState, StepTotals
from parrot.engine.core.output import Generation, Language
from parrot.engine.core.scheduler import LocalScheduler
from parrot.engine.core.validation import RequestLimits, check_request, fork_too_long
from parrot.protocol.engine_api import NO_PARENT, FillResponse, GenerateResponse
from parrot.protocol.errors import (
    Cancelled,
    InvalidRequest,
    NotFound,
    ParrotError,
    QuotaExceeded,
)
from parrot.utils.clock import Clock
from parrot.utils.ids import IdCounter

Delivery = tuple[Callable[[Any], None], Any]


class RequestTable:
    """Accepts requests, opens their jobs when their turn comes, and ends each request once.

    Outcomes wait for `take_outcomes`. Who fails, fails together: a job
    behind a failed one on the same context would run on the wrong tokens, so it fails too."""

    def __init__(
        self,
        tree: ContextTree,
        scheduler: LocalScheduler,
        language: Language,
        limits: RequestLimits,
        clock: Clock,
        totals: StepTotals,
        *,
        max_requests: int,
        random_seed: int,
    ) -> None:
        self._tree = tree
        self._scheduler = scheduler
        self._language = language
        self._limits = limits
        self._clock = clock
        self._totals = totals
        self._max_requests = max_requests
        self._random_seed = random_seed
        self._outbox: list[Delivery] = []
        self._requests: dict[int, RequestState] = {}
        self._lines = JobLines()
        self._forks: dict[Context, None] = {}
        self._job_ids = IdCounter()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def has_forks(self) -> bool:
        """Some contexts wait for their parents."""
        return bool(self._forks)

    def take_outcomes(self) -> list[Delivery]:
        """What has happened to requests since the last call: calls to make, in order, as (method of
        a sink, argument)."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def deliver_later(self, call: Callable[[Any], None], argument: Any) -> None:
        """Add a call to the outcomes."""
        self._outbox.append((call, argument))

    # -- accepting ---------------------------------------------------------------------------

    def accept(self, request: EngineRequest) -> None:
        """Take the request, or refuse it through its sink with nothing changed."""
        try:
            self._check_backlog()
            check_request(request, self._tree, self._lines, self._limits)
        except ParrotError as error:
            self._outbox.append((request.sink.fail, error))
            return
        state = RequestState(
            request.request_id,
            request.sink,
            request.stream,
            self._clock.now(),
            request.background_share,
        )
        self._requests[request.request_id] = state
        last = len(request.pieces) - 1
        for index, piece in enumerate(request.pieces):
            generation = self._generation(request) if index == last else None
            context = self._tree.get(piece.context_id) or self._create(piece, request)
            self._add(
                Job(self._job_ids.next(), state, context, piece, generation, request.priority)
            )
        for context in dict.fromkeys(job.context for job in state.jobs):
            self._advance(context)

    def _check_backlog(self) -> None:
        if len(self._requests) >= self._max_requests:
            raise QuotaExceeded(f"the engine already has {len(self._requests)} requests")

    def _generation(self, request: EngineRequest) -> Generation | None:
        if request.sampling is None:
            return None
        seed = request.sampling.seed
        if seed is None:
            seed = hash((self._random_seed, request.request_id)) & (2**63 - 1)
        return Generation(request.sampling, seed, self._language, request.stream)

    def _create(self, piece: Piece, request: EngineRequest) -> Context:
        if piece.parent_id == NO_PARENT:
            return self._tree.create(piece.context_id, salt=request.cache_salt)
        parent = self._tree.get(piece.parent_id)
        assert parent is not None, f"context {piece.parent_id} vanished"
        context = self._tree.create(piece.context_id, self._fork(parent, piece.parent_len))
        self._forks[context] = None
        return context

    def _fork(self, parent: Context, length: int | None) -> Fork:
        if length is not None:
            return Fork(parent, length, None)
        if line := self._lines.line(parent):
            return Fork(parent, None, line[-1].job_id)
        if parent.fork is not None:  # nothing was ever added to it: the same fork again
            return parent.fork
        return Fork(parent, len(parent.token_ids), None)

    def _add(self, job: Job) -> None:
        job.request.jobs.append(job)
        job.request.num_unfinished += 1
        self._lines.append(job)
        self._hurry(job.context, job.priority)

    def _hurry(self, context: Context, priority: int) -> None:
        """Whoever stands in the way of urgent work is as urgent."""
        while True:
            for job in self._lines.line(context):
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

    def open_forks(self) -> None:
        """Carry out the forks whose parents have got far enough. One may let another follow."""
        num_before = -1
        while len(self._forks) != num_before:
            num_before = len(self._forks)
            for context in list(self._forks):
                self._try_fork(context)

    def _try_fork(self, context: Context) -> None:
        fork = context.fork
        assert fork is not None, f"context {context.context_id} is forked already"
        parent, length = fork.parent, fork.length
        if parent.fork is not None or length is None:
            return
        if parent.num_computed < length:
            if self._lines.line(parent):
                return  # it will get there
            first = self._lines.first(context)
            if (known := len(parent.token_ids)) < length:
                error = fork_too_long(parent.context_id, known, length)
                self.fail_all(self._requests_on(context), error)
                length = known
            elif first is not None and self._should_restore(parent, length):
                self._restore(parent, first)
                return
        self._carry_out_fork(context, length)

    def _should_restore(self, parent: Context, length: int) -> bool:
        """Whether KV that the parent lost is worth computing in the parent, where every fork
        shares it: a block or more, and not much beyond the fork."""
        block_size = self._tree.block_size
        is_worth = length - parent.num_computed >= block_size
        return is_worth and len(parent.token_ids) - length < block_size

    def _restore(self, parent: Context, wanted_by: Job) -> None:
        piece = Piece(parent.context_id, array("i"))
        request, priority = wanted_by.request, wanted_by.priority
        self._add(Job(self._job_ids.next(), request, parent, piece, None, priority))
        self._advance(parent)

    def _carry_out_fork(self, context: Context, length: int) -> None:
        del self._forks[context]
        self._tree.carry_out_fork(context, length)
        self._advance(context)

    def _advance(self, context: Context) -> None:
        """Open the first job of the context's line if it is not; end those with nothing to do."""
        if context.fork is not None:
            return
        while (job := self._lines.first(context)) is not None:
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
            self._end(job)
        self._scheduler.idle.add(context)

    def _open(self, job: Job) -> None:
        """Append the job's tokens to its context and settle how far it can generate."""
        context, piece, generation = job.context, job.piece, job.generation
        num_before = len(context.token_ids)
        first = () if piece.first_id is None or num_before else (piece.first_id,)
        length = num_before + len(first) + len(piece.token_ids)
        self._limits.check_length(length, generation is not None)
        if generation is not None and not length:
            raise InvalidRequest("cannot generate on an empty context")
        context.token_ids.extend(first)
        context.token_ids.extend(piece.token_ids)
        job.is_open = True
        request = job.request
        request.num_filled += length - num_before
        request.num_missing += context.num_missing
        request.prompt_len = length
        if generation is not None:
            generation.max_tokens = min(
                generation.max_tokens, self._limits.max_context_len - length
            )
            if not context.num_missing:
                self._tree.rewind_one(context)

    # -- ending ------------------------------------------------------------------------------

    def finish(self, job: Job) -> None:
        """A running job has all it wanted: answer if it was its request's last, open the next."""
        self._scheduler.remove(job)
        self._tree.publish(job.context)
        self._end(job)
        self._advance(job.context)

    def _end(self, job: Job) -> None:
        job.has_ended = True
        self._lines.remove(job)
        self._settle_lengths(job)
        request = job.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self._requests[request.request_id]
            request.has_ended = True
            response = _response(request, self._clock.now(), self._totals)
            self._outbox.append((request.sink.done, response))

    def _settle_lengths(self, job: Job) -> None:
        """Forks that want all tokens up to the end of `job` now know how many these are."""
        for child in self._forks:
            fork = child.fork
            if fork is not None and fork.after == job.job_id and fork.parent is job.context:
                length = len(job.context.token_ids)
                child.fork = replace(fork, length=length, after=None)

    def abort(self, request_id: int) -> None:
        """The sender is no longer interested; its contexts stay as they are. Unknown ids are
        requests that ended meanwhile."""
        if (request := self._requests.get(request_id)) is not None:
            self.fail_all([request], Cancelled("the request was aborted"))

    def fail_job(self, job: Job, error: ParrotError) -> None:
        """A step went wrong for this job: what it left in its own blocks is not to be trusted."""
        self._tree.distrust(job.context)
        self.fail_all([job.request], error)

    def fail_everything(self, error: ParrotError) -> None:
        self.fail_all(list(self._requests.values()), error)

    def fail_all(self, requests: Iterable[RequestState], error: ParrotError) -> None:
        """Fail these requests, and those that cannot succeed without them."""
        doomed = list(requests)
        touched: dict[Context, None] = {}
        while doomed:
            request = doomed.pop()
            if request.has_ended:
                continue
            request.has_ended = True
            del self._requests[request.request_id]
            self._outbox.append((request.sink.fail, error))
            for job in request.jobs:
                if not job.has_ended:
                    doomed += self._requests_behind(job)
                    touched[job.context] = None
                    self._withdraw(job)
        for context in touched:
            self._advance(context)

    def _requests_on(self, context: Context) -> list[RequestState]:
        return [job.request for job in self._lines.line(context)]

    def _requests_behind(self, job: Job) -> list[RequestState]:
        """Requests later in the job's line, and on forks that want what it would have added."""
        if not job.piece.token_ids and job.generation is None:
            return []  # it would have added nothing
        line = self._lines.line(job.context)
        behind = [other.request for other in line[line.index(job) + 1 :]]
        for child in self._forks:
            fork = child.fork
            if fork is None or fork.parent is not job.context:
                continue
            if fork.after is not None and fork.after >= job.job_id:
                behind += self._requests_on(child)
        return behind

    def _withdraw(self, job: Job) -> None:
        job.has_ended = True
        self._lines.remove(job)
        self._settle_lengths(job)
        if job.is_open:
            self._scheduler.remove(job)

    # -- freeing -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Fail every request and forget every context, children before their parents."""
        self.free([context.context_id for context in reversed(list(self._tree))])

    def free(self, context_ids: Iterable[int]) -> int:
        """Abort the jobs on these contexts and forget them; returns the tokens they held."""
        num_tokens = 0
        for context_id in context_ids:
            context = self._tree.get(context_id)
            if context is None:
                continue
            self.fail_all(self._requests_on(context), Cancelled(f"context {context_id} was freed"))
            for child in [c for c in self._forks if c.fork and c.fork.parent is context]:
                self._orphan(child, context)
            self._forks.pop(context, None)
            self._scheduler.idle.discard(context)
            num_tokens += self._tree.free(context)
        return num_tokens

    def _orphan(self, child: Context, parent: Context) -> None:
        """`parent` is about to be forgotten: `child` takes what it can of it now, or fails."""
        fork = child.fork
        assert fork is not None, f"context {child.context_id} is forked already"
        known = len(parent.token_ids) if parent.fork is None else parent.fork.length or 0
        length = fork.length
        if length is None or length > known:
            error = NotFound(f"context {parent.context_id} was freed before it could be forked")
            self.fail_all(self._requests_on(child), error)
            length = known
        if parent.fork is None:
            self._carry_out_fork(child, length)
        else:
            child.fork = Fork(parent.fork.parent, length, None)

    def check_integrity(self) -> None:
        num_open = 0
        for context in self._tree:
            line = self._lines.line(context)
            assert (context.fork is not None) == (context in self._forks), context
            assert line or not context.block_ids or context in self._scheduler.idle, context
            for index, job in enumerate(line):
                assert job.context is context, job
                assert job.is_open == (index == 0 and context.fork is None), job
                assert not job.request.has_ended, job
                num_open += job.is_open
        assert num_open == self._scheduler.num_jobs, (num_open, self._scheduler.num_jobs)


def _response(
    request: RequestState, now: float, totals: StepTotals
) -> FillResponse | GenerateResponse:
    generation = next((job.generation for job in request.jobs if job.generation), None)
    if generation is None:
        return FillResponse(
            filled_len=request.num_filled,
            cached_tokens=max(0, request.prompt_len - request.num_missing),
            computed_tokens=request.num_missing,
        )
    assert generation.finish_reason is not None, "the generation has not ended"
    return GenerateResponse.model_construct(
        generated_text=generation.text(),
        generated_ids=generation.output_ids,
        finish_reason=generation.finish_reason,
        usage=request.usage(len(generation.output_ids), now, totals),
    )
