"""Baselines for order and placement, as in other services, and a simulated cluster that uses them.

    app_fifo        the oldest application first; within an application, in order of arrival
    las             the application with the least attained service first; within it, by arrival
    round_robin     every engine in turn
    prefix_aware    the engine that was sent the longest prefix of the prompt, as in routers

The baselines use neither graphs nor predicted seconds."""

from collections.abc import Hashable, Mapping
from itertools import chain

from parrot.serve.config import CoreConfig
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.scheduling.load import Charge, EngineLoad, LoadIndex
from parrot.serve.scheduling.placement import Choice, Placer
from parrot.serve.scheduling.queue import ByApplication
from parrot.serve.scheduling.scheduler import MakeOrder, MakePlacer
from parrot.serve.scheduling.task import CompletionTask
from parrot.simulation import SimCluster
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict

# The defaults of SGLang's router.
_MIN_MATCH = 0.3  # The fraction of a prompt that an engine must have seen to be preferred.
_BALANCE_ABS, _BALANCE_REL = 64, 1.5  # If the load difference exceeds both, only load counts.

_MAX_KEYS = 100_000  # The maximum number of remembered prefixes.


class _Ranked(ByApplication):
    """Also gives engines each application's rank: its key when its last call ended. Calls that are
    placed before the next end have equal rank, as the calls of a stage should."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._places: dict[int, float] = {}

    def priority_s(self, task: CompletionTask) -> float:
        session_id = task.completion.session_id
        return self._places.setdefault(session_id, self.group_key(session_id))

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        self._accounts[task.completion.session_id].served_s += charge.duration_s

    def finished(self, task: CompletionTask) -> None:
        super().finished(task)
        self._places.pop(task.completion.session_id, None)


class AppFifo(_Ranked):
    """Older applications first."""

    def group_key(self, group: Hashable) -> float:
        assert isinstance(group, int)
        return self._accounts[group].start


class LeastAttainedService(_Ranked):
    """The application with the least service first, including running calls. A call counts as the
    seconds that were predicted when it was placed."""

    def group_key(self, group: Hashable) -> float:
        assert isinstance(group, int)
        return self._accounts[group].served_s


class Router(Placer):
    """Finds the engines with capacity for a task. Subclasses choose one of them."""

    def _open(self, task: CompletionTask) -> list[EngineLoad]:
        """The engines with capacity for the task. An engine that failed with this task is
        included only if no other has capacity."""
        found = [load for load in self._loads.members(task.models) if self._has_room(task, load)]
        return [load for load in found if load.id not in task.failed_engines] or found

    def _has_room(self, task: CompletionTask, load: EngineLoad) -> bool:
        new_prompt = task.prompt_len - self._loads.running.shared_len(task, load.id)
        is_free = load.is_open and load.fits(task, new_prompt)
        return is_free and self._loads.accepts(load, task)

    def _choice(self, task: CompletionTask, load: EngineLoad | None) -> Choice | None:
        if load is None:
            return None
        return Choice(load, task.prompt_len - self._loads.running.shared_len(task, load.id))


class RoundRobin(Router):
    """Chooses the engines in turn."""

    def __init__(self, loads: LoadIndex) -> None:
        super().__init__(loads)
        self._last_id = -1

    def choose(self, task: CompletionTask, now: float) -> Choice | None:
        found = sorted(self._open(task), key=lambda load: load.id)
        later = (load for load in found if load.id > self._last_id)
        return self._choice(task, next(chain(later, found), None))

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        super().placed(task, engine_id, charge)
        self._last_id = engine_id


class PrefixAware(Router):
    """The engine that was sent the longest prefix of the prompt, if this prefix is long enough and
    the load is not too uneven. Otherwise the engine with the fewest tasks. The router does not know
    about evictions."""

    def __init__(self, loads: LoadIndex) -> None:
        super().__init__(loads)
        self._sent: LruDict[bytes, set[int]] = LruDict(_MAX_KEYS)

    def choose(self, task: CompletionTask, now: float) -> Choice | None:
        found = self._open(task)
        if found and not self._is_uneven(task):
            matches = {load.id: self._matched(task, load) for load in found}
            longest = max(matches.values())
            if longest > _MIN_MATCH * task.prompt_len:
                found = [load for load in found if matches[load.id] == longest]
        best = min(found, key=lambda load: (load.num_tasks, load.id), default=None)
        return self._choice(task, best)

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        super().placed(task, engine_id, charge)
        for key in task.keys:
            if (engines := self._sent.get(key)) is None:
                self._sent.put(key, engines := set())
            engines.add(engine_id)

    def _is_uneven(self, task: CompletionTask) -> bool:
        counts = [load.num_tasks for load in self._loads.members(task.models)]
        most, least = max(counts), min(counts)
        return most - least > _BALANCE_ABS and most > _BALANCE_REL * least

    def _matched(self, task: CompletionTask, load: EngineLoad) -> int:
        matched = 0
        for key, length in zip(task.keys, task.lengths, strict=True):
            if load.id not in (self._sent.peek(key) or ()):
                break
            matched += length
        return matched


ORDERS: Mapping[str, MakeOrder] = {"app_fifo": AppFifo, "las": LeastAttainedService}
PLACERS: Mapping[str, MakePlacer] = {"round_robin": RoundRobin, "prefix_aware": PrefixAware}


NAMES = frozenset({*ORDERS, *PLACERS})


def cluster_with(*names: str) -> type[SimCluster]:
    """Simulated clusters that order and place calls by the named baselines. Names that are not
    baselines have no effect: the config applies."""

    class BaselineCluster(SimCluster):
        def make_dispatcher(self, config: CoreConfig) -> Dispatcher:
            order = next((ORDERS[name] for name in names if name in ORDERS), None)
            placer = next((PLACERS[name] for name in names if name in PLACERS), None)
            return Dispatcher(config, self.clock, self.connect, order=order, placer=placer)

    return BaselineCluster
