"""The part of each engine that the tenants' placed tasks take."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from parrot.serve.scheduling.engine_load import EngineLoad
from parrot.serve.scheduling.placement import Held
from parrot.serve.scheduling.task import CompletionTask

_MOST = 2  # times as many tasks on an engine as it has places


@dataclass(slots=True)
class _Held:
    weight: float
    num_tasks: int = 0
    num_tokens: int = 0


class HeldByTenants:
    """Says of a task whether its tenant has less of an engine than others there, and whether it has
    room there in the tenant's share, though all places may be taken. `weight_of` knows the weights
    of tenants that have tasks."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._engines: defaultdict[int, dict[str, _Held]] = defaultdict(dict)
        self._tokens: dict[CompletionTask, int] = {}

    def add(self, task: CompletionTask, engine_id: int, num_tokens: int) -> None:
        """`num_tokens`: its prompt, without what other running prompts have, and its room."""
        tenant, there = task.tenant, self._engines[engine_id]
        if (held := there.get(tenant)) is None:
            held = there[tenant] = _Held(self._weight_of(tenant))
        held.num_tasks += 1
        held.num_tokens += num_tokens
        self._tokens[task] = num_tokens

    def remove(self, task: CompletionTask, engine_id: int) -> None:
        tenant, there = task.tenant, self._engines[engine_id]
        held = there[tenant]
        held.num_tasks -= 1
        held.num_tokens -= self._tokens.pop(task)
        if not held.num_tasks:
            del there[tenant]
            if not there:
                del self._engines[engine_id]

    def is_lesser(self, task: CompletionTask, engine_id: int) -> bool:
        """Whether some other tenant has more tasks there, by weight, than the task's tenant would
        have with it."""
        there = self._engines.get(engine_id)
        tenant = task.tenant
        if there is None or not there.keys() - {tenant}:
            return False
        own, weight = there.get(tenant), self._weight_of(tenant)
        num_tasks = 1 + (0 if own is None else own.num_tasks)
        most = max(h.num_tasks / h.weight for name, h in there.items() if name != tenant)
        return most > num_tasks / weight

    def share(self, task: CompletionTask, load: EngineLoad, num_tokens: int) -> Held | None:
        """The tasks that its tenant has there, if this one, with so many tokens, is within its part
        of the engine, by the weights of those who are there, and others have more. None also where
        the engine has no room, and other ServeCores have a part of it: what comes beyond ours would
        be at their cost."""
        if load.num_tasks >= _MOST * load.max_tasks or not self.is_lesser(task, load.id):
            return None
        if load.lease is not None:
            return None
        there, tenant = self._engines[load.id], task.tenant
        weight = self._weight_of(tenant)
        own = there.get(tenant) or _Held(weight)
        part = weight / (weight + sum(h.weight for name, h in there.items() if name != tenant))
        if own.num_tasks + 1 > part * load.max_tasks:
            return None
        if own.num_tokens + num_tokens > part * load.max_tokens:
            return None
        return Held(own.num_tasks, own.num_tokens)

    def check_integrity(self, loads: list[EngineLoad]) -> None:
        """Recount by the placed tasks. Raises AssertionError with what differs."""
        placed = {task for load in loads for task in load.tasks}
        assert placed == self._tokens.keys(), self._tokens
        for load in loads:
            there = self._engines.get(load.id, {})
            assert sum(h.num_tasks for h in there.values()) == len(load.tasks), load.id
            total = sum(self._tokens[task] for task in load.tasks)
            assert sum(h.num_tokens for h in there.values()) == total, load.id
