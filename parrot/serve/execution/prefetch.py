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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from parrot.protocol.engine_api import FillPiece, FillRequest
from parrot.protocol.errors import ParrotError
from parrot.serve.contexts.forecast import Forecast
from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.engines import Engine
from parrot.serve.execution.request import open_fill
from parrot.serve.execution.run import Attempt
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.prompts.encode import encode_prompt
from parrot.serve.prompts.segments import Segment
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_MIN_BLOCKS = 4  # a shorter piece is not worth an exchange
_WASTED_SHARE = 0.02  # how much longer steps may become for what nobody will use
_MAX_SHARE = 0.2
_PRIOR_TOKENS = 16384
_MEMORY = 7 / 8  # from one completion to the next

MakeTask = Callable[[Completion, Sequence[Segment], Sequence[bytes]], CompletionTask]


@dataclass(slots=True)
class PrefetchCounts:
    """Tokens computed ahead; of these, those whose completion then ran on that engine, and those
    whose completion ran elsewhere or not at all."""

    filled: int = 0
    used: int = 0
    wasted: int = 0


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


class _Prefix(NamedTuple):
    """See `PrefixListener`."""

    segments: Sequence[Segment]
    keys: Sequence[bytes]
    forecast: Forecast


@dataclass(slots=True, eq=False)
class _Ahead:
    """The work ahead for one completion. `current`: the piece under way; `more`: another
    has become ready meanwhile. `is_used` is None until the completion starts or is given up.
    `num_asked`: tokens that were computed or are under way."""

    completion: Completion
    engine: Engine
    prefix: _Prefix
    budget: Budget
    current: Attempt | None = None
    runner: asyncio.Task[None] | None = None
    done: list[Attempt] = field(default_factory=list)
    more: bool = False
    num_asked: int = 0
    num_filled: int = 0
    is_used: bool | None = None


class Prefetcher:
    """A `PrefixListener`. `choose` says where a task would run now, `runs_session` whether an
    engine has a call of a session now, `make_task` makes a task of a beginning, and `wake` has
    `pump` called soon, after ready work was placed."""

    def __init__(
        self,
        ledger: ContextLedger,
        choose: Callable[[CompletionTask], Engine | None],
        runs_session: Callable[[int, int], bool],
        make_task: MakeTask,
        wake: Callable[[], None],
    ) -> None:
        self.counts = PrefetchCounts()
        self._budget = Budget(prior=1.0)
        self._budget_when_sure = Budget(prior=0.1)  # completions that wait for others only
        self._ledger = ledger
        self._choose = choose
        self._runs_session = runs_session
        self._make_task = make_task
        self._wake = wake
        self._due: dict[Completion, _Prefix] = {}
        self._ahead: dict[Completion, _Ahead] = {}
        self._under_way: dict[tuple[int, bytes], _Ahead] = {}  # by engine and last key
        self._runners = TaskSet()

    # What happens to completions

    def ready_prefix_grew(
        self,
        completion: Completion,
        segments: Sequence[Segment],
        keys: Sequence[bytes],
        forecast: Forecast,
    ) -> None:
        self._due[completion] = _Prefix(segments, keys, forecast)
        self._wake()

    def dropped(self, completion: Completion) -> None:
        if completion.state is CompletionState.QUEUED:
            self._due.pop(completion, None)
        else:
            self.give_up(completion)

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
        if ahead is None:
            return
        self._settle(ahead, is_used=False)
        self._stop(ahead)
        for attempt in reversed(ahead.done):
            for context in reversed(attempt.opened):
                self._ledger.release(context)

    def forget_engine(self, engine_id: int) -> None:
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
            if ahead is not None and ahead.runner is not None:
                ahead.more = True
            else:
                self._consider(completion, prefix)

    def _consider(self, completion: Completion, prefix: _Prefix) -> None:
        task = self._make_task(completion, prefix.segments, prefix.keys)
        ahead = self._ahead.get(completion)
        engine = self._choose(task) if ahead is None else ahead.engine
        if engine is None or not (num_missing := self._num_worthwhile(task, engine)):
            return
        is_sure = prefix.forecast() < inf
        if is_sure and self._runs_session(engine.id, completion.session_id):
            return  # it would delay the very calls that this one waits for
        if ahead is None:
            budget = self._budget_when_sure if is_sure else self._budget
            ahead = self._ahead[completion] = _Ahead(completion, engine, prefix, budget)
        ahead.num_asked += num_missing
        ahead.current = Attempt(task, engine)
        self._under_way[engine.id, task.keys[-1]] = ahead
        ahead.runner = self._runners.spawn(
            self._run(ahead, ahead.current), name=f"eager fill for {completion.id}"
        )

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
        has_room = self._ledger.make_spare_room(engine.id, num_missing + 2 * block_size)
        return num_missing if has_room else 0

    async def _run(self, ahead: _Ahead, attempt: Attempt) -> None:
        try:
            await self._fill_all(ahead, attempt, await self._open(attempt))
        except ParrotError as error:
            logger.debug("eager fill for %d: %s", ahead.completion.id, error.message)
            ahead.num_asked = ahead.num_filled
            self._stop(ahead)
            return
        except Exception:
            logger.exception("eager fill for %d failed", ahead.completion.id)
            self._stop(ahead)
            return
        self._leave(ahead)
        ahead.done.append(attempt)
        if attempt.context is not None:
            attempt.context.mark_computed()
            self._ledger.unpin(attempt.context)
            attempt.context = None
        if ahead.more and ahead.is_used is None:
            ahead.more = False
            self._consider(ahead.completion, ahead.prefix)

    async def _fill_all(self, ahead: _Ahead, attempt: Attempt, pieces: list[FillPiece]) -> None:
        """Post all pieces at once: their contexts can be found from now on, and a call that forks
        one which the engine has not heard of would wait for it."""
        fills = [asyncio.ensure_future(self._fill(ahead, attempt, piece)) for piece in pieces]
        try:
            await asyncio.gather(*fills)
        finally:
            for fill in fills:
                fill.cancel()

    async def _open(self, attempt: Attempt) -> list[FillPiece]:
        task = attempt.task
        chat = task.completion.options.chat
        parts = await encode_prompt(task.segments, chat, attempt.tokenizer, is_whole=False)
        return open_fill(self._ledger, attempt, parts)

    async def _fill(self, ahead: _Ahead, attempt: Attempt, piece: FillPiece) -> None:
        completion = attempt.task.completion
        request = FillRequest.model_construct(
            context_id=piece.context_id,
            parent_context_id=piece.parent_context_id,
            parent_len=piece.parent_len,
            token_ids=piece.token_ids,
            session_id=completion.session_id,
            task_id=completion.id,
            cache_salt=completion.options.tenant,
            background=True,
            background_share=ahead.budget.share,
        )
        response = await attempt.engine.client.fill(request)
        self._count(ahead, response.computed_tokens)

    # Ends

    def _stop(self, ahead: _Ahead) -> None:
        """End the piece under way, and free its contexts unless somebody has forked them."""
        attempt, runner = ahead.current, ahead.runner
        if attempt is None or runner is None:
            return
        self._leave(ahead)
        if runner is not asyncio.current_task():
            runner.cancel()
        if attempt.context is not None:
            self._ledger.unpin(attempt.context)
            attempt.context = None
        for context in reversed(attempt.opened):
            self._ledger.release(context)

    def _leave(self, ahead: _Ahead) -> None:
        """Nothing is under way for it any more."""
        assert ahead.current is not None
        del self._under_way[ahead.engine.id, ahead.current.task.keys[-1]]
        ahead.current = ahead.runner = None

    def _count(self, ahead: _Ahead, num_filled: int) -> None:
        self.counts.filled += num_filled
        ahead.num_filled += num_filled
        if ahead.is_used is not None:
            self._attribute(num_filled, ahead.is_used)

    def _settle(self, ahead: _Ahead, *, is_used: bool) -> None:
        ahead.is_used = is_used
        ahead.budget.add(ahead.num_asked, is_used=is_used)
        self._attribute(ahead.num_filled, is_used)

    def _attribute(self, num_tokens: int, is_used: bool) -> None:
        if is_used:
            self.counts.used += num_tokens
        else:
            self.counts.wasted += num_tokens

    def users(self) -> Counter[int]:
        """How many fills use each context, by its id."""
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
