"""Eager fill: the ready prefix of a completion that waits for inputs is computed while it waits.

    prompt          |-- ready prefix -----------|  missing  ...
    contexts        |-- tenant's --|-- eager 1 --|-- eager 2 --|      a piece became ready: one more
    completion                                                 |-- late part --|-- output --|

The prefix goes to the engine where the completion would go now, as contexts like any others, so
that the completion finds it there and continues it. The engine computes it in the background: only
with steps and memory that nothing else needs."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from parrot.protocol.engine_api import FillPiece, FillRequest
from parrot.protocol.errors import ParrotError
from parrot.serve.contexts.forecast import ReadyPrefix
from parrot.serve.contexts.index import LedgerContext
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.fleet import Engine, Fleet
from parrot.serve.execution.prompting import open_fill
from parrot.serve.execution.run import Attempt
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.prompts.encode import encode_prompt
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.serve.scheduling.task import CompletionTask, Estimates
from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_MIN_BLOCKS = 4  # a shorter piece is not worth an exchange
_WASTED_SHARE = 0.02  # how much longer steps may become for what nobody will use
_MAX_SHARE = 0.2
_PRIOR_TOKENS = 16384
_MEMORY = 7 / 8  # from one completion to the next


@dataclass(slots=True)
class PrefetchCounts:
    """Tokens computed ahead; of these, those whose completion then ran on that engine, and those
    whose completion ran elsewhere or not at all."""

    filled: int = 0
    used: int = 0
    wasted: int = 0

    def attribute(self, num_tokens: int, *, is_used: bool) -> None:
        if is_used:
            self.used += num_tokens
        else:
            self.wasted += num_tokens


@dataclass(slots=True)
class Budget:
    """How much of an engine's time may go into what is perhaps computed for nothing, by how many of
    the tokens that were asked for lately were wasted. Before anything is known, `prior` of them."""

    prior: float
    asked: float = _PRIOR_TOKENS
    wasted: float = field(init=False)

    def __post_init__(self) -> None:
        self.wasted = self.prior * self.asked

    def add(self, num_tokens: int, *, is_used: bool) -> None:
        self.asked = self.asked * _MEMORY + num_tokens
        self.wasted = self.wasted * _MEMORY + (0 if is_used else num_tokens)

    @property
    def share(self) -> float:
        """The share of an engine's time for more of the same. What will be used only comes earlier;
        what is wasted takes `_WASTED_SHARE`, as expected."""
        return min(_MAX_SHARE, _WASTED_SHARE * self.asked / max(self.wasted, 1.0))


@dataclass(slots=True, eq=False)
class _Ahead:
    """The work ahead for one completion. `current`: the piece under way; `filled`: the contexts of
    those before. `is_used` is None until the completion starts or is given up. `num_asked`: tokens
    that were computed or are under way."""

    completion: Completion
    engine: Engine
    budget: Budget
    current: Attempt | None = None
    filled: list[LedgerContext] = field(default_factory=list)
    num_asked: int = 0
    num_filled: int = 0
    is_used: bool | None = None


class Prefetcher:
    """Fills what ready prefixes have, where the scheduler would place their completions now. `wake`
    has `pump` called soon, after ready work was placed."""

    def __init__(
        self,
        clock: Clock,
        ledger: ContextLedger,
        scheduler: Scheduler,
        fleet: Fleet,
        estimates: Estimates,
        wake: Callable[[], None],
    ) -> None:
        self.counts = PrefetchCounts()
        self._budget = Budget(prior=1.0)
        self._budget_when_sure = Budget(prior=0.1)  # completions that wait for others only
        self._clock = clock
        self._ledger = ledger
        self._scheduler = scheduler
        self._fleet = fleet
        self._estimates = estimates
        self._wake = wake
        self._due: dict[Completion, ReadyPrefix] = {}
        self._ahead: dict[Completion, _Ahead] = {}
        self._under_way: dict[tuple[int, bytes], _Ahead] = {}  # by engine and last key
        self._runners = TaskSet()

    # What happens to completions

    def grew(self, completion: Completion, prefix: ReadyPrefix) -> None:
        """The completion waits, and more of its prompt is known than before."""
        self._due[completion] = prefix
        self._wake()

    def started(self, completion: Completion, engine_id: int) -> None:
        """It runs on this engine now."""
        ahead = self._ahead.get(completion)
        if ahead is None:
            return
        if ahead.engine.id != engine_id:
            self.give_up(completion)
            return
        del self._ahead[completion]
        self._settle(ahead, is_used=True)

    def give_up(self, completion: Completion) -> None:
        """It will not run where its prefix is: stop, and free what nobody else wants."""
        self._due.pop(completion, None)
        ahead = self._ahead.pop(completion, None)
        if ahead is not None:
            self._settle(ahead, is_used=False)
            self._stop(ahead)
            self._release(ahead.filled)

    def remove_engine(self, engine_id: int) -> None:
        """It is gone with all its contexts. Before the ledger forgets them."""
        for ahead in [a for a in self._ahead.values() if a.engine.id == engine_id]:
            del self._ahead[ahead.completion]
            self._settle(ahead, is_used=False)
        for ahead in [a for a in self._under_way.values() if a.engine.id == engine_id]:
            self._stop(ahead)

    # Filling

    def pump(self) -> None:
        """Begin what has become due."""
        due, self._due = self._due, {}
        for completion, prefix in due.items():
            ahead = self._ahead.get(completion)
            if completion.state is not CompletionState.WAITING:
                continue
            if ahead is not None and ahead.current is not None:
                self._due[completion] = prefix  # when that piece is there
            else:
                self._consider(completion, prefix, ahead)

    def _consider(self, completion: Completion, prefix: ReadyPrefix, ahead: _Ahead | None) -> None:
        task = CompletionTask(
            completion,
            list(prefix.segments),
            tuple(prefix.keys),
            self._clock.now(),
            self._estimates.output_tokens(completion),
            self._estimates.tokens_per_char(completion.options.models),
        )
        engine = self._choose(task) if ahead is None else ahead.engine
        if engine is None or not (num_missing := self._num_worthwhile(task, engine)):
            return
        is_sure = prefix.forecast() < inf
        load = self._scheduler.engines.get(engine.id)
        if is_sure and load is not None and load.runs_session(completion.session_id):
            return  # it would delay the very calls that this one waits for
        if ahead is None:
            budget = self._budget_when_sure if is_sure else self._budget
            ahead = self._ahead[completion] = _Ahead(completion, engine, budget)
        ahead.num_asked += num_missing
        attempt = ahead.current = Attempt(task, engine)
        self._under_way[engine.id, task.keys[-1]] = ahead
        attempt.runner = self._runners.spawn(
            self._run(ahead, attempt), name=f"eager fill for {completion.id}"
        )

    def _choose(self, task: CompletionTask) -> Engine | None:
        """Where it would go now. If nobody asks for it yet, rather where its session has most of
        the prompt, since there it goes once somebody does."""
        completion = task.completion
        preferred: Iterable[int] = ()
        if not completion.reader_demand:
            preferred = self._ledger.index.engines_of_owner(completion.session_id, task.keys)
        engine_id = self._scheduler.preview(task, preferred)
        return None if engine_id is None else self._fleet.engines.get(engine_id)

    def _num_worthwhile(self, task: CompletionTask, engine: Engine) -> int:
        """How many tokens are missing there; 0 if they are few, somebody fills them already, or
        there is no room without harm."""
        if engine.tokenizer is None or (engine.id, task.keys[-1]) in self._under_way:
            return 0
        match = self._ledger.index.match(engine.id, task.keys)
        num_missing = sum(task.lengths[0 if match is None else match.num_covered :])
        block_size = engine.info.block_size
        if num_missing < _MIN_BLOCKS * block_size:
            return 0
        wanted = num_missing + 2 * block_size
        has_room = self._ledger.evict_for_prefetch(engine.id, wanted, task.tenant)
        return num_missing if has_room else 0

    async def _run(self, ahead: _Ahead, attempt: Attempt) -> None:
        try:
            await self._fill_all(ahead, attempt)
        except ParrotError as error:
            logger.debug("eager fill for %d: %s", ahead.completion.id, error.message)
            ahead.num_asked = ahead.num_filled
            self._stop(ahead)
        except Exception:
            logger.exception("eager fill for %d failed", ahead.completion.id)
            self._stop(ahead)
        else:
            self._leave(ahead)
            ahead.filled += attempt.opened
            if attempt.context is not None:
                attempt.context.mark_computed()
                self._ledger.unpin(attempt.context)
        self._wake()

    async def _fill_all(self, ahead: _Ahead, attempt: Attempt) -> None:
        """Post all pieces at once: their contexts can be found from now on, and a call that forks
        one which the engine has not heard of would wait for it."""
        chat = ahead.completion.options.chat
        segments = attempt.task.segments
        limit = attempt.engine.max_len
        parts = await encode_prompt(segments, chat, attempt.tokenizer, limit=limit, is_whole=False)
        pieces = open_fill(self._ledger, attempt, parts)
        fills = [asyncio.ensure_future(self._fill(ahead, piece)) for piece in pieces]
        try:
            await asyncio.gather(*fills)
        finally:
            for fill in fills:
                fill.cancel()

    async def _fill(self, ahead: _Ahead, piece: FillPiece) -> None:
        completion = ahead.completion
        request = FillRequest.model_construct(
            **dict(piece),
            session_id=completion.session_id,
            task_id=completion.id,
            cache_salt=completion.options.cache_salt,
            tenant=completion.options.tenant,
            weight=self._scheduler.weight(completion.options.tenant),
            background=True,
            background_share=ahead.budget.share,
        )
        response = await ahead.engine.client.fill(request)
        self.counts.filled += response.computed_tokens
        ahead.num_filled += response.computed_tokens
        if ahead.is_used is not None:
            self.counts.attribute(response.computed_tokens, is_used=ahead.is_used)

    # Ends

    def _stop(self, ahead: _Ahead) -> None:
        """End the piece under way, and free its contexts unless somebody has forked them."""
        attempt = ahead.current
        if attempt is None:
            return
        self._leave(ahead)
        if attempt.runner is not None and attempt.runner is not asyncio.current_task():
            attempt.runner.cancel()
        if attempt.context is not None:
            self._ledger.unpin(attempt.context)
        self._release(attempt.opened)

    def _release(self, contexts: list[LedgerContext]) -> None:
        for context in reversed(contexts):
            self._ledger.release(context)

    def _leave(self, ahead: _Ahead) -> None:
        """Nothing is under way for it any more."""
        assert ahead.current is not None
        del self._under_way[ahead.engine.id, ahead.current.task.keys[-1]]
        ahead.current = None

    def _settle(self, ahead: _Ahead, *, is_used: bool) -> None:
        ahead.is_used = is_used
        ahead.budget.add(ahead.num_asked, is_used=is_used)
        self.counts.attribute(ahead.num_filled, is_used=is_used)

    def users(self) -> Counter[int]:
        """The number of fills that use each context, by its id."""
        attempts = [a.current for a in self._under_way.values() if a.current is not None]
        return Counter(a.context.id for a in attempts if a.context is not None)

    def check_integrity(self) -> None:
        for ahead in self._ahead.values():
            assert ahead.is_used is None, ahead
            assert ahead.completion.state in (CompletionState.WAITING, CompletionState.QUEUED)
        for (engine_id, key), ahead in self._under_way.items():
            assert ahead.current is not None, ahead
            assert (ahead.engine.id, ahead.current.task.keys[-1]) == (engine_id, key), ahead

    async def close(self) -> None:
        for completion in list(self._ahead):
            self.give_up(completion)
        await self._runners.close()
