"""Predicted seconds: the one currency in which placements are compared."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parrot.serve.scheduler.task import CompletionTask


@dataclass(frozen=True, slots=True)
class CostModel:
    """A decode step takes `step_s`, plus `sequence_s` for every running sequence, plus `token_s`
    for every token in their contexts; a prompt token takes `prefill_s`. Only the proportions
    matter for choosing; the defaults are those of a 7-8B model on a current GPU."""

    step_s: float = 5e-3
    sequence_s: float = 5e-5
    token_s: float = 4e-8
    prefill_s: float = 3e-5

    def decode_step_s(self, num_tasks: int, num_tokens: int) -> float:
        return self.step_s + num_tasks * self.sequence_s + num_tokens * self.token_s


@dataclass(slots=True)
class EngineLoad:
    """What was placed on an engine and has not ended. `num_tokens`: prompts (shared beginnings
    once) and room for outputs. `prefill_until`: when it will have computed the prompts. `cost`:
    what its answers have taught of its speed."""

    id: int
    model: str
    max_tasks: int
    max_tokens: int
    cost: CostModel
    num_tasks: int = 0
    num_latency: int = 0
    num_tokens: int = 0
    prefill_until: float = 0.0
    weight: float = 0.0  # the key in the order of load: how much a decode step has grown
    tasks: dict[CompletionTask, int] = field(default_factory=dict)  # with room kept for the output

    @property
    def is_open(self) -> bool:
        return self.num_tasks < self.max_tasks


class RunningPrefixes:
    """The segments of the prompts that run on each engine: key -> engine -> how many tasks have it,
    and the tokens that it is taken to have (tasks may estimate the same text differently)."""

    def __init__(self) -> None:
        self._running: dict[bytes, dict[int, tuple[int, int]]] = {}

    def add(self, task: CompletionTask, engine_id: int) -> int:
        """Returns the tokens of the segments that no running task there had."""
        new_tokens = 0
        for key, length in zip(task.keys, task.lengths, strict=True):
            engines = self._running.setdefault(key, {})
            count, known_length = engines.get(engine_id, (0, length))
            if not count:
                new_tokens += length
            engines[engine_id] = (count + 1, known_length)
        return new_tokens

    def remove(self, task: CompletionTask, engine_id: int) -> int:
        """Returns the tokens of the segments that no running task there has any more."""
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
        """Recount by the tasks of each engine; returns the tokens of each engine's segments."""
        counts = Counter((key, e) for e, there in tasks.items() for t in there for key in t.keys)
        tokens = dict.fromkeys(tasks, 0)
        for key, engines in self._running.items():
            for engine_id, (count, length) in engines.items():
                assert counts.pop((key, engine_id), 0) == count, (key, engine_id, count)
                tokens[engine_id] += length
        assert not counts, counts
        return tokens

    def shared_len(self, task: CompletionTask, engine_id: int) -> int:
        """Tokens of the longest beginning that a running task there has too."""
        shared = 0
        for key, length in zip(task.keys, task.lengths, strict=True):
            engines = self._running.get(key)
            if engines is None or engine_id not in engines:
                break
            shared += length
        return shared

    def holders(self, keys: Sequence[bytes], limit: int) -> Iterator[int]:
        """Up to `limit` engines that run a task with a beginning of this prompt, longest first."""
        for key in reversed(keys):
            for engine_id in self._running.get(key, ()):
                if limit <= 0:
                    return
                limit -= 1
                yield engine_id
