"""Chooses the engine of a task: the engine on which the task and the tasks already there lose the
least predicted time. `docs/internals/placement.md` explains the terms of the cost."""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf, nextafter
from typing import NamedTuple

from parrot.serve.contexts.index import PrefixIndex
from parrot.serve.scheduling.load import Charge, EngineLoad, LoadIndex, latency_weight
from parrot.serve.scheduling.prefixes import Block, PrefixHolders, QueuedBlocks
from parrot.serve.scheduling.task import CompletionTask


class Site(NamedTuple):
    """An engine as a candidate for tasks of a block. `n` tasks of the block finish after
    `start_s + n * each_s` and delay other tasks by `harm_s + n * harm_each_s` weighted seconds."""

    engine_id: int
    start_s: float
    each_s: float
    harm_s: float
    harm_each_s: float
    room: int  # Number of tasks of the block that fit.


def split(
    sites: Sequence[Site], num_tasks: int, tolerance: float, most: int | None = None
) -> list[tuple[int, int]]:
    """Split a block over engines. Returns pairs (engine id, number of tasks) for all tasks that
    fit.

    Chooses the fewest engines whose cost is at most `1 + tolerance` times the smallest cost. The
    cost is the time until the block finishes plus the harm to other tasks per task of the block.
    At most `most` engines are used, unless they have too few free slots for all tasks."""
    usable = [site for site in sites if site.room > 0]
    usable.sort(key=lambda s: s.start_s + s.each_s + s.harm_s / num_tasks + s.harm_each_s)
    num_tasks = min(num_tasks, sum(site.room for site in usable))
    if not num_tasks:
        return []
    ways: list[tuple[float, list[tuple[Site, int]]]] = []
    for count in _counts(min(len(usable), num_tasks, most or len(usable))):
        chosen = usable[:count]
        if sum(site.room for site in chosen) >= num_tasks:
            shares = balance(chosen, num_tasks)
            ways.append((_cost(shares, num_tasks), shares))
    if not ways:  # `most` engines have too few free slots for all tasks.
        shares = balance(usable, num_tasks)
    else:
        limit = min(cost for cost, _ in ways) * (1 + tolerance)
        shares = next(shares for cost, shares in ways if cost <= limit)
    return [(site.engine_id, share) for site, share in shares]


def balance(sites: Sequence[Site], num_tasks: int) -> list[tuple[Site, int]]:
    """Assign each task to the engine on which it finishes first. So the last task finishes as early
    as possible. Returns the engines with at least one task. All tasks must fit."""
    shares = [0] * len(sites)
    heap = [(site.start_s + site.each_s, i) for i, site in enumerate(sites)]
    heapq.heapify(heap)
    for _ in range(num_tasks):
        end_s, i = heap[0]
        shares[i] += 1
        if shares[i] < sites[i].room:
            heapq.heapreplace(heap, (end_s + sites[i].each_s, i))
        else:
            heapq.heappop(heap)
    return [(site, share) for site, share in zip(sites, shares, strict=True) if share]


def _cost(shares: Sequence[tuple[Site, int]], num_tasks: int) -> float:
    end_s = max(site.start_s + share * site.each_s for site, share in shares)
    harm_s = sum(site.harm_s + share * site.harm_each_s for site, share in shares)
    return end_s + harm_s / num_tasks


def _counts(most: int) -> Iterator[int]:
    """Yield the numbers of engines to try: 1, 2, 3, 4, 6, 8, 12, ... and `most`."""
    count = 1
    while count < most:
        yield count
        count += 1 << max(0, count.bit_length() - 2)
    yield most


# Number of least loaded engines that are candidates for a task. A larger value finds better engines
# and costs more CPU time.
_LEAST_LOADED = 4
# Upper limit of the least loaded engines that are candidates for a block.
_MAX_SITES = 16
# Number of engines with a cached prefix that are candidates. A common prefix may be on all engines.
_MAX_HOLDERS = 16
# Factor on the seconds in which a task's prompt is computed. It is above 1 because a related task
# may compute the same prefix before this task starts.
_WORK_WEIGHT = 1.5
# Factor on the seconds in which evicted KV is computed again. It is 3 because the KV that returns
# evicts other KV in turn.
_LOSS_WEIGHT = 2.0 * _WORK_WEIGHT
# Throughput tasks next to latency tasks may lengthen a step to this multiple of an empty step.
_LATENCY_STEP_GROWTH = 2.0
# A block may finish later by this fraction of its time if it then uses fewer engines.
_THROUGHPUT_TOLERANCE, _LATENCY_TOLERANCE = 0.05, 0.01


Costs = dict[int, float | None]
"""Predicted seconds on each candidate engine. None: the task does not fit there."""


class InUse(NamedTuple):
    """The slots and the KV tokens that a tenant uses on an engine."""

    num_tasks: int
    num_tokens: int


MayOvercommit = Callable[[EngineLoad, int], InUse | None]
"""Whether a task may be placed on a full engine. The second argument is the number of KV tokens
that the task adds. Returns the current use of the task's tenant there. None: it may not."""


class Choice(NamedTuple):
    """The engine for a task."""

    load: EngineLoad
    to_compute: int  # Prompt tokens that the engine must compute.
    costs: Costs | None = None  # None: the block's plan or a single candidate decided.


class Placer:
    """Base class of placement policies. Chooses an engine for one task at a time. The scheduler
    reports queued tasks with `queued` and `unqueued`. A task is still queued during `choose`."""

    def __init__(self, loads: LoadIndex) -> None:
        self._loads = loads

    def choose(self, task: CompletionTask, now: float) -> Choice | None:
        """Choose an engine with a free slot and a model of the task. None: all engines are full."""
        raise NotImplementedError

    def preview(self, task: CompletionTask, now: float) -> Choice | None:
        """The choice for a task that is not queued. Changes no state."""
        return self.choose(task, now)

    def overcommit(self, task: CompletionTask, now: float, may: MayOvercommit) -> Choice | None:
        """A full engine on which `may` permits the task. None: there is no such engine, or the
        placer does not overcommit."""
        return None

    def new_round(self) -> None:
        """A new round of scheduling begins: time or loads have changed since the last choice."""

    def queued(self, task: CompletionTask) -> None: ...

    def unqueued(self, task: CompletionTask) -> None: ...

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        """The task was placed on the engine and is no longer queued."""
        self.unqueued(task)

    def released(
        self, task: CompletionTask, engine_id: int, charge: Charge, actual_s: float
    ) -> None: ...

    def check_integrity(self, queued: Iterable[CompletionTask]) -> None: ...


class LowestCostPlacer(Placer):
    """Chooses the engine with the lowest cost: the task's predicted seconds plus the seconds that
    it takes from the tasks there, weighted by `latency_weight`. Candidates are the least loaded
    engines and engines with a prefix of the prompt. Queued tasks that belong together are placed as
    a block, when the first of them has its turn."""

    def __init__(
        self,
        loads: LoadIndex,
        blocks: QueuedBlocks,
        *,
        index: PrefixIndex | None,
        with_running: bool,
    ) -> None:
        """`index`: the cached prefixes. None: caches are ignored. `with_running`: prefixes of
        running prompts count as cached."""
        super().__init__(loads)
        self._index = index
        self._with_running = with_running
        self._blocks = blocks
        # The plan of each block: a heap of pairs (-number of tasks, engine id).
        self._plans: dict[Hashable, list[tuple[int, int]]] = {}

    def choose(self, task: CompletionTask, now: float) -> Choice | None:
        known = self._find(task)
        load = self._next_planned(task, now, known)
        return self._cheapest(task, now, known) if load is None else _choice(task, load, known)

    def preview(self, task: CompletionTask, now: float) -> Choice | None:
        return self._cheapest(task, now, self._find(task))

    def overcommit(self, task: CompletionTask, now: float, may: MayOvercommit) -> Choice | None:
        known = self._find(task)
        found = self._candidates(task, _LEAST_LOADED, known)
        found += self._loads.least_loaded(task, _LEAST_LOADED, full=True)
        best, best_cost = None, (inf, -1)
        for load in found:
            new_prompt = task.prompt_len - known.shared_len(load.id)
            if (own := may(load, new_prompt + load.reserved_output(task))) is not None:
                cost_s = self._own_cost_s(task, load, now, known, own)
                if (cost_s, load.id) < best_cost:
                    best, best_cost = load, (cost_s, load.id)
        return None if best is None else _choice(task, best, known)

    def _cheapest(self, task: CompletionTask, now: float, known: PrefixHolders) -> Choice | None:
        candidates = self._candidates(task, _LEAST_LOADED, known)
        if len(candidates) == 1:
            (load,) = candidates
            fits = self._growth_s(task, load, now, known) is not None
            return _choice(task, load, known) if fits else None
        best, best_cost = None, (inf, -1)
        costs: Costs = {}
        for load in candidates:
            costs[load.id] = cost_s = self._cost_s(task, load, now, known)
            if cost_s is not None and (cost_s, load.id) < best_cost:
                best, best_cost = load, (cost_s, load.id)
        return None if best is None else _choice(task, best, known, costs)

    def new_round(self) -> None:
        self._plans.clear()

    def queued(self, task: CompletionTask) -> None:
        self._blocks.add(task)

    def unqueued(self, task: CompletionTask) -> None:
        self._blocks.remove(task)

    def check_integrity(self, queued: Iterable[CompletionTask]) -> None:
        self._blocks.check_integrity(queued)

    def _find(self, task: CompletionTask) -> PrefixHolders:
        cached = None if self._index is None else self._index.likely_holders
        return PrefixHolders.of(task, self._loads.running.holders, cached, self._with_running)

    def _candidates(
        self, task: CompletionTask, count: int, known: PrefixHolders
    ) -> list[EngineLoad]:
        """The `count` least loaded engines, and engines with a prefix of the prompt. An engine on
        which the task failed is a candidate only if it is the last one left."""
        found = self._loads.least_loaded(task, count + len(task.failed_engines))
        candidates = {load.id: load for load in found}
        if known.reusable and len(candidates) < self._loads.num_open(task.models):
            for engine_id in known.engines(_MAX_HOLDERS):
                load = self._loads.get(engine_id)
                if load is not None and load.is_open and self._loads.accepts(load, task):
                    candidates[engine_id] = load
        for engine_id in task.failed_engines:
            if len(candidates) > 1:
                candidates.pop(engine_id, None)
        return list(candidates.values())

    # One task

    def _cost_s(
        self, task: CompletionTask, load: EngineLoad, now: float, known: PrefixHolders
    ) -> float | None:
        """Predicted seconds of the task, plus the seconds that other tasks lose. The latter are
        weighted relative to the task's weight. None: the task does not fit on the engine now."""
        growth_s = self._growth_s(task, load, now, known)
        if growth_s is None:
            return None
        output, outlook = task.expected_output, load.outlook(now)
        to_compute = task.prompt_len - known.reused_len(load.id)
        prefill_s = to_compute * load.costs.prefill_s
        cost_s = outlook.wait_s + _WORK_WEIGHT * prefill_s + self._copy_s(task, load)
        cost_s += outlook.steps_s(output) + output * growth_s
        cost_s += self._loss_s(task, load, now, to_compute)
        return cost_s + outlook.harm_s(prefill_s, output, growth_s) / latency_weight(task)

    def _own_cost_s(
        self, task: CompletionTask, load: EngineLoad, now: float, known: PrefixHolders, own: InUse
    ) -> float:
        """Predicted seconds of an overcommitted task, from the load of its own tenant.

        The load of other tenants does not count, since the engine limits its effect. Otherwise a
        chat would leave its cached prefix for an engine with fewer calls of other tenants."""
        output = task.expected_output
        num_read = own.num_tokens + task.prompt_len - known.shared_len(load.id) + output // 2
        to_compute = task.prompt_len - known.reused_len(load.id)
        cost_s = _WORK_WEIGHT * to_compute * load.costs.prefill_s + self._copy_s(task, load)
        cost_s += self._loss_s(task, load, now, to_compute)
        return cost_s + output * load.costs.decode_step_s(own.num_tasks + 1, num_read)

    def _copy_s(self, task: CompletionTask, load: EngineLoad) -> float:
        """Seconds to copy the prompt's KV from CPU memory to GPU memory. Other tasks do not wait
        for the copy."""
        if not load.costs.host_token_s or self._index is None:
            return 0.0
        match = self._index.match(load.id, task.keys)
        if match is None:
            return 0.0
        return match.context.num_on_host(match.boundary.length) * load.costs.host_token_s

    def _loss_s(self, task: CompletionTask, load: EngineLoad, now: float, to_compute: int) -> float:
        """Weighted seconds to compute again the KV that the task evicts: KV of sessions that will
        continue, or the estimated cache of a foreign server."""
        if self._index is None:
            return 0.0
        if (usage := self._index.kv_usage.get(load.id)) is not None:
            num_new = to_compute + task.expected_output
            return _LOSS_WEIGHT * load.costs.prefill_s * usage.session_tokens_evicted(num_new)
        if (cache := self._index.server_caches.get(load.id)) is None:
            return 0.0
        match = self._index.match(load.id, task.keys)
        num_new = task.num_chars - (0 if match is None else match.boundary.length)
        lost = cache.eviction_cost(None if match is None else match.context, num_new, now)
        return _LOSS_WEIGHT * lost * task.tokens_per_char * load.costs.prefill_s

    def _growth_s(
        self, task: CompletionTask, load: EngineLoad, now: float, known: PrefixHolders
    ) -> float | None:
        """Seconds by which the task lengthens a step. None: the task does not fit there now."""
        new_prompt = task.prompt_len - known.shared_len(load.id)
        if not load.fits(task, new_prompt):
            return None
        num_read = new_prompt + task.expected_output // 2
        growth_s = load.costs.sequence_s + num_read * load.costs.token_s
        return None if _growth_limit_s(task, load, now) < growth_s else growth_s

    # Blocks

    def _next_planned(
        self, task: CompletionTask, now: float, known: PrefixHolders
    ) -> EngineLoad | None:
        """The next engine of the plan of the task's block. None: there is no plan, or its engines
        are full."""
        if task.failed_engines or self._loads.num_open(task.models) < 2:
            return None
        block = self._blocks.find(task)
        # The last queued task of a group is not a block, but the plan still has an engine for it.
        key = (task.models, task.group) if block is None else block.key
        plan = self._plans.get(key, [])
        if not plan and block is not None:
            plan = self._plans[key] = self._plan(task, block, now, known)
        while plan:
            # The engine with the most tasks left is next. Tasks are sorted by length, and this
            # spreads the longest tasks over the engines.
            left, engine_id = heappop(plan)
            load = self._loads.get(engine_id)
            if load is None or not load.is_open or not self._loads.accepts(load, task):
                continue
            if self._growth_s(task, load, now, known) is not None:
                if left < -1:
                    heappush(plan, (left + 1, engine_id))
                return load
        return None

    def _plan(
        self, task: CompletionTask, block: Block, now: float, known: PrefixHolders
    ) -> list[tuple[int, int]]:
        # Other blocks use the other engines, so each prefix is computed on few engines.
        share = block.size / self._blocks.num_tasks(task.models)
        most = max(1, round(self._loads.num_open(task.models) * share))
        candidates = self._candidates(task, min(_MAX_SITES, 2 * block.size), known)
        sites = [self._site(task, block, load, now, known) for load in candidates]
        tolerance = _LATENCY_TOLERANCE if task.is_latency else _THROUGHPUT_TOLERANCE
        shares = split(sites, block.size, tolerance, most)
        return sorted((-share, engine_id) for engine_id, share in shares)

    def _site(
        self, task: CompletionTask, block: Block, load: EngineLoad, now: float, known: PrefixHolders
    ) -> Site:
        cost, output, outlook = load.costs, task.expected_output, load.outlook(now)
        new_shared = max(0, block.shared - known.shared_len(load.id))
        own = max(0.0, block.prompt_len - block.shared)
        reused = known.reused_len(load.id)
        fill_s = max(0, block.shared - reused) * cost.prefill_s
        own_fill_s = own * cost.prefill_s
        growth_s = cost.sequence_s + (own + output // 2) * cost.token_s
        shared_growth_s = new_shared * cost.token_s
        each = own + load.reserved_output(task)
        free = load.max_tokens - load.num_tokens - new_shared
        room = min(load.num_slots - load.num_tasks, int(free / each))
        spare_s = _growth_limit_s(task, load, now) - shared_growth_s
        if spare_s < room * growth_s:
            room = int(spare_s / growth_s)
        weight = latency_weight(task)
        return Site(
            load.id,
            outlook.wait_s
            + fill_s
            + outlook.steps_s(output)
            + output * shared_growth_s
            + self._loss_s(task, load, now, task.prompt_len - reused),
            own_fill_s + output * growth_s,
            outlook.harm_s(fill_s, output, shared_growth_s) / weight,
            outlook.harm_s(own_fill_s, output, growth_s) / weight,
            max(0, room),
        )


def _choice(
    task: CompletionTask, load: EngineLoad, known: PrefixHolders, costs: Costs | None = None
) -> Choice:
    return Choice(load, task.prompt_len - known.reused_len(load.id), costs)


def delay_limit(task: CompletionTask) -> float:
    """The time from which a throughput task is placed next to latency tasks without a limit on
    their steps: when it has waited as long as its remaining path takes."""
    return nextafter(task.arrived + task.remaining_path_s, inf)


def _growth_limit_s(task: CompletionTask, load: EngineLoad, now: float) -> float:
    """Seconds by which the task may lengthen a step of the engine. Latency tasks limit their batch.
    The limit ends at `delay_limit`. Otherwise throughput tasks would starve on engines that always
    have latency tasks."""
    if task.is_latency or not load.num_latency or now >= delay_limit(task):
        return inf
    return _LATENCY_STEP_GROWTH * load.costs.step_s - load.step_s
