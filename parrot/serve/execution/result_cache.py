"""One run for all identical deterministic calls: in flight they share a task, later its result.

    first call    submit -> task -------- running ------> set    -> result kept
    second call        submit -> follows the task ------> set
    third call                                 submit at once <-----|

Identical: the same prompt by content (so also the same outputs of earlier calls), tenant, models,
chat flag and sampling, which is greedy or seeded. A task runs for its *leader*, the completion it
was made for; when nobody wants that one any more, it goes on for a follower."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from sys import getsizeof
from typing import NamedTuple

from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.graph.nodes import Completion, CompletionState, RunStats
from parrot.serve.graph.variable import TokenizedText
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock

_ENTRY_BYTES = 400  # of a result besides its text and ids


class Result(NamedTuple):
    """What a finished call gives to those that come after it. `ids`: None if no ids stand for
    exactly this text."""

    text: str
    tokenizer_id: str | None
    ids: "array[int] | None"
    engine_name: str | None
    model: str | None
    output_tokens: int
    expires_at: float
    num_bytes: int

    @property
    def tokenized(self) -> TokenizedText | None:
        if self.tokenizer_id is None or self.ids is None:
            return None
        return TokenizedText(self.tokenizer_id, tuple(self.ids))

    def stats(self) -> RunStats:
        """Of a call that takes it."""
        return _reused(self.engine_name, self.model, self.output_tokens)


@dataclass(slots=True)
class _Shelf:
    """One tenant's results, least recently used first."""

    results: OrderedDict[bytes, Result] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResultCache:
    """Results by key, at most `max_bytes` in all. When they are too many, the tenant that has the
    most loses those that it used least recently: nobody can push out all that others have."""

    def __init__(self, max_bytes: int, time_to_live_s: float, clock: Clock) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._time_to_live_s = time_to_live_s
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    def get(self, tenant: str, key: bytes) -> Result | None:
        shelf = self._shelves.get(tenant)
        result = None if shelf is None else shelf.results.get(key)
        if shelf is None or result is None:
            return None
        if result.expires_at <= self._clock.now():
            self._remove(tenant, key)
            return None
        shelf.results.move_to_end(key)
        return result

    def put(
        self, tenant: str, key: bytes, text: str, tokenized: TokenizedText | None, made: RunStats
    ) -> None:
        """Keep a result that is not there yet, if there is room for so much. `made`: of the call
        that made it."""
        ids = None if tokenized is None else array("i", tokenized.ids)
        result = Result(
            text,
            None if tokenized is None else tokenized.tokenizer_id,
            ids,
            made.engine_name,
            made.model,
            made.output_tokens,
            self._clock.now() + self._time_to_live_s,
            _ENTRY_BYTES + getsizeof(text) + (0 if ids is None else ids.itemsize * len(ids)),
        )
        if result.num_bytes > self._max_bytes:
            return
        shelf = self._shelves.get(tenant)
        if shelf is None:
            shelf = self._shelves[tenant] = _Shelf()
        assert key not in shelf.results, key
        shelf.results[key] = result
        shelf.num_bytes += result.num_bytes
        self.num_bytes += result.num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._shelves, key=lambda name: self._shelves[name].num_bytes)
            self._remove(largest, next(iter(self._shelves[largest].results)))

    def check_integrity(self) -> None:
        for shelf in self._shelves.values():
            assert shelf.results, "an empty shelf"
            assert shelf.num_bytes == sum(r.num_bytes for r in shelf.results.values())
        assert self.num_bytes == sum(shelf.num_bytes for shelf in self._shelves.values())
        assert self.num_bytes <= self._max_bytes, (self.num_bytes, self._max_bytes)

    def _remove(self, tenant: str, key: bytes) -> None:
        shelf = self._shelves[tenant]
        result = shelf.results.pop(key)
        shelf.num_bytes -= result.num_bytes
        self.num_bytes -= result.num_bytes
        if not shelf.results:
            del self._shelves[tenant]


class Reuse:
    """Who shares whose run."""

    def __init__(self, config: GlobalSchedulerConfig, clock: Clock) -> None:
        self._is_on = config.reuse_results
        self._clock = clock
        self._cache = ResultCache(config.reuse_cache_size, config.reuse_timeout, clock)
        self._tasks: dict[bytes, CompletionTask] = {}  # in flight, by result key
        self._following: dict[int, CompletionTask] = {}  # by the follower's id

    def key(self, completion: Completion, prompt_keys: Sequence[bytes]) -> bytes | None:
        """Equal for identical calls; None if the call is not one to be shared. The last prompt key
        stands for tenant, chat flag and prompt, and cannot be made by anybody else. A sampling
        field that is given with its default value counts as another than one that is not given."""
        options, sampling = completion.options, completion.sampling
        if not (self._is_on and options.reuse and prompt_keys and sampling.is_deterministic):
            return None
        fields = sampling.__dict__
        given = [(name, fields[name]) for name in sorted(sampling.model_fields_set)]
        rest = repr((options.models, given)).encode("utf-8", "surrogatepass")
        return hashlib.sha256(prompt_keys[-1] + rest).digest()

    def answer(self, completion: Completion, key: bytes) -> bool:
        """Settle it with a result that is there; False if there is none."""
        result = self._cache.get(completion.options.tenant, key)
        if result is None:
            return False
        self._set(completion, result.text, result.tokenized, result.stats())
        return True

    def follow(self, completion: Completion, key: bytes) -> CompletionTask | None:
        """Wait for the task in flight that does the same, which is returned if there is one."""
        task = self._tasks.get(key)
        if task is None:
            return None
        completion.state = CompletionState.QUEUED
        completion.output.append(task.completion.output.partial_text)
        task.followers.append(completion)
        self._following[completion.id] = task
        return task

    def lead(self, task: CompletionTask) -> None:
        """A new task, which others may follow."""
        if task.result_key is not None:
            self._tasks[task.result_key] = task

    def leader_of(self, completion: Completion) -> Completion:
        """Whose task it follows; itself if it follows none."""
        task = self._following.get(completion.id)
        return completion if task is None else task.completion

    def leave(self, completion: Completion) -> bool:
        """The follower wants nothing any more; False if it is none."""
        task = self._following.pop(completion.id, None)
        if task is None:
            return False
        task.followers.remove(completion)
        return True

    def promote(self, task: CompletionTask) -> Completion | None:
        """The first follower, if there is one, stops following and is to be the new leader. It has
        seen the same text as the old one."""
        if not task.followers:
            return None
        heir = task.followers.pop(0)
        del self._following[heir.id]
        leader = task.completion
        heir.state, heir.stats = leader.state, replace(leader.stats)
        heir.times.started = leader.times.started
        return heir

    def ended(self, task: CompletionTask) -> None:
        """Nobody can join the task any more. If it has followers, `take_followers` must come."""
        if task.result_key is not None:
            del self._tasks[task.result_key]

    def finish(self, task: CompletionTask, text: str, tokenized: TokenizedText | None) -> None:
        """Keep the result, and give it to all who wait for it, the leader first."""
        self.ended(task)
        leader = task.completion
        if task.result_key is None:
            self._set(leader, text, tokenized, leader.stats)
            return
        made = leader.stats
        self._cache.put(leader.options.tenant, task.result_key, text, tokenized, made)
        self._set(leader, text, tokenized, made)
        for follower in self.take_followers(task):
            stats = _reused(made.engine_name, made.model, made.output_tokens)
            self._set(follower, text, tokenized, stats)

    def take_followers(self, task: CompletionTask) -> Iterator[Completion]:
        """One after the other: settling one may make another leave."""
        while task.followers:
            follower = task.followers.pop(0)
            del self._following[follower.id]
            yield follower

    def check_integrity(self, tasks: Iterable[CompletionTask]) -> None:
        """`tasks`: all that are queued or running."""
        live = list(tasks)
        shared = {task.result_key: task for task in live if task.result_key is not None}
        assert self._tasks == shared, (self._tasks, shared)
        following = {follower.id: task for task in live for follower in task.followers}
        assert self._following == following, (self._following, following)
        for task in live:
            for follower in task.followers:
                assert follower.state is CompletionState.QUEUED, follower
                assert follower.output.partial_text == task.completion.output.partial_text
        self._cache.check_integrity()

    def _set(
        self, completion: Completion, text: str, tokenized: TokenizedText | None, stats: RunStats
    ) -> None:
        completion.stats = stats
        completion.state = CompletionState.DONE
        completion.times.finished = self._clock.now()
        completion.output.set(text, tokenized)


def _reused(engine_name: str | None, model: str | None, output_tokens: int) -> RunStats:
    return RunStats(engine_name, model, output_tokens=output_tokens, is_reused=True)
