"""The engines in order of load, per model."""

import heapq
from collections.abc import Iterator

from parrot.serve.scheduler.cost import EngineLoad

ANY_MODEL = None


class LoadIndex:
    """Every engine's load, and lazy heaps that give the least loaded engines of a model: an entry
    counts only while its weight is the engine's, and the engine has a free slot."""

    def __init__(self) -> None:
        self._loads: dict[int, EngineLoad] = {}
        self._heaps: dict[str | None, list[tuple[float, int]]] = {ANY_MODEL: []}
        self._members: dict[str | None, set[int]] = {ANY_MODEL: set()}
        self._num_open: dict[str | None, int] = {ANY_MODEL: 0}

    def __iter__(self) -> Iterator[EngineLoad]:
        return iter(self._loads.values())

    def get(self, engine_id: int) -> EngineLoad | None:
        return self._loads.get(engine_id)

    def add(self, load: EngineLoad) -> None:
        self._loads[load.id] = load
        for name in (ANY_MODEL, load.model):
            self._members.setdefault(name, set()).add(load.id)
            self._heaps.setdefault(name, [])
            self._num_open[name] = self._num_open.get(name, 0) + load.is_open
        self._file(load)

    def remove(self, engine_id: int) -> EngineLoad:
        load = self._loads.pop(engine_id)
        for name in (ANY_MODEL, load.model):
            self._members[name].discard(engine_id)
            self._num_open[name] -= load.is_open
            if name is not ANY_MODEL and not self._members[name]:
                del self._members[name], self._heaps[name], self._num_open[name]
        return load

    def is_served(self, models: tuple[str, ...]) -> bool:
        return any(self._members.get(name) for name in models or (ANY_MODEL,))

    def has_open(self, models: tuple[str, ...]) -> bool:
        """Some engine with one of the models (empty: any) has a free slot."""
        return any(self._num_open.get(name, 0) for name in models or (ANY_MODEL,))

    def change(self, load: EngineLoad, tasks: int, latency: int, tokens: int) -> None:
        """Add these to the load (negative: take away)."""
        was_open = load.is_open
        load.num_tasks += tasks
        load.num_latency += latency
        load.num_tokens += tokens
        assert load.num_tasks >= 0, load
        assert load.num_tokens >= 0, load
        if load.is_open is not was_open:
            for name in (ANY_MODEL, load.model):
                self._num_open[name] += 1 if load.is_open else -1
        self._file(load)

    def least_loaded(self, models: tuple[str, ...], count: int) -> list[EngineLoad]:
        """Up to `count` open engines per model, least loaded first."""
        found: list[EngineLoad] = []
        for name in models or (ANY_MODEL,):
            heap = self._heaps.get(name)
            if heap is not None:
                found += self._least(heap, count)
        return found

    def _least(self, heap: list[tuple[float, int]], count: int) -> list[EngineLoad]:
        found: list[EngineLoad] = []
        entries: list[tuple[float, int]] = []
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            load = self._loads.get(entry[1])
            if load is None or load.weight != entry[0] or not load.is_open or entry in entries:
                continue
            found.append(load)
            entries.append(entry)
        for entry in entries:
            heapq.heappush(heap, entry)
        return found

    def _file(self, load: EngineLoad) -> None:
        load.weight = load.cost.decode_step_s(load.num_tasks, load.num_tokens)
        if not load.is_open:
            return
        for name in (ANY_MODEL, load.model):
            heap = self._heaps[name]
            heapq.heappush(heap, (load.weight, load.id))
            if len(heap) > 64 + 4 * len(self._members[name]):
                heap[:] = [
                    (other.weight, engine_id)
                    for engine_id in self._members[name]
                    if (other := self._loads[engine_id]).is_open
                ]
                heapq.heapify(heap)
