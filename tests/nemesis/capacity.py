"""The promise about `tasks_capacity`, checked by the calls that engines answered."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.nemesis.history import AnsweredCall, History

_CLOSE_S = 0.05  # Time in which an engine learns that ServeCore closed the connection of a call.


def exceeded(history: History) -> Iterator[str]:
    """Yield the processes of engines that had more calls at once than their `tasks_capacity`.

    An interactive call may exceed it by the share of its tenant. Tenants have equal weights here,
    so with two of them on an engine that is at most half of the capacity."""
    capacity = history.tasks_capacity
    processes: defaultdict[tuple[str, int], list[AnsweredCall]] = defaultdict(list)
    for call in history.answered_calls:
        processes[call.engine, call.process].append(call)
    for (engine, process), calls in processes.items():
        for at, tenants in _most(calls):
            limit = capacity + (capacity // 2 if len(tenants) > 1 else 0)
            if max(tenants.values()) > capacity or tenants.total() > limit:
                held = ", ".join(f"{count} of {name}" for name, count in sorted(tenants.items()))
                yield f"{engine} (process {process}) had {held} at {at:.3f}, of {capacity} calls"
                break


def _most(calls: list[AnsweredCall]) -> Iterator[tuple[float, Counter[str]]]:
    """Yield each time at which a call arrived, and the calls of each tenant at that time.

    ServeCore may have cancelled a call just before the engine answered it. The last `_CLOSE_S` of
    each call therefore do not count."""
    counted = [call for call in calls if call.ended - call.began > _CLOSE_S]
    arrivals = [(call.began, 1, call.tenant) for call in counted]
    ends = [(call.ended - _CLOSE_S, -1, call.tenant) for call in counted]
    now = Counter[str]()
    for at, change, tenant in sorted(arrivals + ends):
        now[tenant] += change
        if change > 0:
            yield at, +now
