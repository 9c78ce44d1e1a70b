"""How many of a block's tasks go to which engine.

engine 0  |wait|shared fill|own|own|own|....decode....|      ends at start_s + 3 each_s
engine 1       |shared fill|own|own|....decode....|          start_s + 2 each_s
engine 2                                                     not used: it would end hardly sooner
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Site(NamedTuple):
    """An engine as a place for n tasks of a block: they end after `start_s + n * each_s` and cost
    others `harm_s + n * harm_each_s`; at most `room` of them fit."""

    engine_id: int
    start_s: float
    each_s: float
    harm_s: float
    harm_each_s: float
    room: int


def split(
    sites: Sequence[Site], num_tasks: int, tolerance: float, most: int | None = None
) -> list[tuple[int, int]]:
    """Shares for engines: (engine, tasks), of all tasks as far as they fit. Of the ways to split,
    over at most `most` engines if these hold all, the one over the fewest whose cost is within
    `tolerance` (relative) of the least; the cost is the block's last end, and the harm to others
    per task of the block."""
    usable = [site for site in sites if site.room > 0]
    usable.sort(key=lambda s: s.start_s + s.each_s + s.harm_s / num_tasks + s.harm_each_s)
    num_tasks = min(num_tasks, sum(site.room for site in usable))
    if not num_tasks:
        return []
    ways: list[tuple[float, list[tuple[Site, int]]]] = []
    for count in _counts(min(len(usable), num_tasks, most or len(usable))):
        chosen = usable[:count]
        if sum(site.room for site in chosen) >= num_tasks:
            shares = level(chosen, num_tasks)
            ways.append((_cost(shares, num_tasks), shares))
    if not ways:  # only many small places together hold them
        shares = level(usable, num_tasks)
    else:
        limit = min(cost for cost, _ in ways) * (1 + tolerance)
        shares = next(shares for cost, shares in ways if cost <= limit)
    return [(site.engine_id, share) for site, share in shares]


def level(sites: Sequence[Site], num_tasks: int) -> list[tuple[Site, int]]:
    """The shares, those above zero, with the earliest last end: each next task goes where it ends
    first. There must be room for all."""
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
    """1, 2, 3, 4, 6, 8, 12, ... and `most`: enough to come near the best number."""
    count = 1
    while count < most:
        yield count
        count += 1 << max(0, count.bit_length() - 2)
    yield most
