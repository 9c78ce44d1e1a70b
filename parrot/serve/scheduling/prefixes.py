"""Common prefixes of prompts: of running tasks on each engine, of cached contexts, and of queued
tasks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple, Self

from parrot.serve.scheduling.task import CompletionTask

# Shortest common prefix, in tokens, of a block. A larger value forms fewer blocks.
_MIN_SHARED_TOKENS = 128


class RunningPrefixes:
    """Counts the segments of the prompts that run on each engine."""

    def __init__(self) -> None:
        # By prefix key and engine id: the number of tasks, and the tokens of the key's last
        # segment. The tokens are the first task's estimate, since estimates may differ.
        self._running: dict[bytes, dict[int, tuple[int, int]]] = {}

    def add(self, task: CompletionTask, engine_id: int) -> int:
        """Returns the tokens of the segments that no other running task has on the engine."""
        new_tokens = 0
        for key, length in zip(task.keys, task.lengths, strict=True):
            engines = self._running.setdefault(key, {})
            count, known_length = engines.get(engine_id, (0, length))
            if not count:
                new_tokens += length
            engines[engine_id] = (count + 1, known_length)
        return new_tokens

    def remove(self, task: CompletionTask, engine_id: int) -> int:
        """Returns the tokens of the segments that no remaining task has on the engine."""
        old_tokens = 0
        for key in task.keys:
            engines = self._running[key]
            count, length = engines[engine_id]
            if count > 1:
                engines[engine_id] = (count - 1, length)
                continue
            old_tokens += length
            del engines[engine_id]
            if not engines:
                del self._running[key]
        return old_tokens

    def check_integrity(self, tasks: Mapping[int, Iterable[CompletionTask]]) -> dict[int, int]:
        """Recount the tasks of each engine. Returns the tokens of each engine's segments."""
        counts = Counter((key, e) for e, there in tasks.items() for t in there for key in t.keys)
        tokens = dict.fromkeys(tasks, 0)
        for key, engines in self._running.items():
            for engine_id, (count, length) in engines.items():
                assert counts.pop((key, engine_id), 0) == count, (key, engine_id, count)
                tokens[engine_id] += length
        assert not counts, counts
        return tokens

    def shared_len(self, task: CompletionTask, engine_id: int) -> int:
        """Tokens of the longest prefix that a running task on the engine also has."""
        shared = 0
        for key, length in zip(task.keys, task.lengths, strict=True):
            engines = self._running.get(key)
            if engines is None or engine_id not in engines:
                break
            shared += length
        return shared

    def holders(self, key: bytes) -> Collection[int] | None:
        """The engines with a running task that has the prefix of this key. None: no engine."""
        return self._running.get(key)


Holders = Callable[[bytes], Collection[int] | None]
"""Returns the engines that have the prefix of a key. None: no engine."""


class PrefixHolders(NamedTuple):
    """The engines that have a prefix of a task's prompt. Each list has pairs (engines, tokens of
    the prefix), the longest prefix first."""

    running: list[tuple[Collection[int], int]]  # A running prompt has the prefix.
    reusable: list[tuple[Collection[int], int]]  # The engine need not compute the prefix.

    @classmethod
    def of(
        cls, task: CompletionTask, running: Holders, cached: Holders | None, with_running: bool
    ) -> Self:
        """`with_running`: prefixes of running prompts are reusable, like cached prefixes."""
        found = cls([], [])
        length = task.prompt_len
        for i in range(len(task.keys) - 1, -1, -1):
            key = task.keys[i]
            if cached is not None and (engines := cached(key)) is not None:
                found.reusable.append((engines, length))
            if (engines := running(key)) is not None:
                found.running.append((engines, length))
                if with_running:
                    found.reusable.append((engines, length))
            length -= task.lengths[i]
        return found

    def shared_len(self, engine_id: int) -> int:
        return _length(self.running, engine_id)

    def reused_len(self, engine_id: int) -> int:
        return _length(self.reusable, engine_id)

    def engines(self, limit: int) -> Iterator[int]:
        """The first `limit` engines with a reusable prefix, possibly repeated."""
        return islice(chain.from_iterable(holders for holders, _ in self.reusable), limit)


def _length(prefixes: list[tuple[Collection[int], int]], engine_id: int) -> int:
    for holders, length in prefixes:
        if engine_id in holders:
            return length
    return 0


class Block(NamedTuple):
    """Queued tasks that belong together: they have a common prefix, or they are in one group."""

    key: Hashable
    size: int  # Number of tasks.
    shared: int  # Tokens of the common prefix. 0: the tasks have only their group in common.
    prompt_len: float  # Average tokens of a prompt.


class QueuedBlocks:
    """Finds queued tasks with a common prefix or group, before any of them runs."""

    def __init__(self, *, by_prefix: bool, by_group: bool) -> None:
        self._by_prefix = by_prefix
        self._by_group = by_group
        # By prefix key or group: the number of tasks, and the sum of their prompt tokens.
        self._counts: dict[Hashable, tuple[int, int]] = {}
        self._num_tasks: defaultdict[tuple[str, ...], int] = defaultdict(int)

    def num_tasks(self, models: tuple[str, ...]) -> int:
        """Number of queued tasks for these models."""
        return self._num_tasks.get(models, 0)

    def add(self, task: CompletionTask) -> None:
        self._count(task, 1)

    def remove(self, task: CompletionTask) -> None:
        self._count(task, -1)

    def find(self, task: CompletionTask) -> Block | None:
        """The block of a queued task. None: no other queued task belongs to it.

        The block has the tasks with the longest common prefix, or the group if it is larger."""
        group = self._counts.get((task.models, task.group)) if task.group else None
        if group is None and task.prompt_len < _MIN_SHARED_TOKENS:
            return None
        wanted = 2 if group is None else max(2, group[0])
        shared = task.prompt_len
        for key, length in zip(reversed(task.keys), reversed(task.lengths), strict=True):
            if shared < _MIN_SHARED_TOKENS:
                break
            found = self._counts.get((task.models, key))
            if found is not None and found[0] >= wanted:
                return Block((task.models, key), found[0], shared, found[1] / found[0])
            shared -= length
        if group is None or group[0] < 2:
            return None
        return Block((task.models, task.group), group[0], 0, group[1] / group[0])

    def _count(self, task: CompletionTask, sign: int) -> None:
        self._num_tasks[task.models] += sign
        if not self._num_tasks[task.models]:
            del self._num_tasks[task.models]
        for key in self._keys(task):
            count, tokens = self._counts.get(key, (0, 0))
            if count + sign:
                self._counts[key] = (count + sign, tokens + sign * task.prompt_len)
            else:
                del self._counts[key]

    def _keys(self, task: CompletionTask) -> list[Hashable]:
        keys: list[Hashable] = []
        if self._by_prefix and task.prompt_len >= _MIN_SHARED_TOKENS:
            length = 0
            for key, own in zip(task.keys, task.lengths, strict=True):
                length += own
                if length >= _MIN_SHARED_TOKENS:
                    keys.append((task.models, key))
        if self._by_group and task.group is not None:
            keys.append((task.models, task.group))
        return keys

    def check_integrity(self, tasks: Iterable[CompletionTask]) -> None:
        tasks = list(tasks)
        assert self._num_tasks == Counter(task.models for task in tasks), self._num_tasks
        counts = Counter(key for task in tasks for key in self._keys(task))
        assert counts == {key: count for key, (count, _) in self._counts.items()}, counts
