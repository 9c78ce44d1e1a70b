"""Decoding steps as CUDA graphs.

A graph is captured for a number of rows (a bucket) and room for a plan (a `Capacity`). A step runs
in the smallest that holds it; rows and items that are left over do nothing. Rooms come in few
sizes, so after a while every step finds its graph.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parrot.engine.attention.triton_backend import TritonAttention, TritonPlan
from parrot.engine.cuda.forward import Forward
from parrot.engine.kernels.attention import Capacity, PlanBuffers
from parrot.engine.kernels.gate import AttentionShape
from parrot.engine.kernels.work_list import SplitConfig, WorkList

logger = logging.getLogger(__name__)

_MAX_SHARED = 128
_MIN_SHARED = 8

# Where a step of so many rows finds its tokens, positions, ..., as a plan for these buffers.
Bind = Callable[[int, PlanBuffers], tuple[torch.Tensor, TritonPlan]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Row by row: the token of the largest logit, or -1 where the logits are not finite."""

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    plan: PlanBuffers
    decoded: Decoded
    work: WorkList | None


def decode(logits: torch.Tensor) -> Decoded:
    """A maximum is NaN if anything is, so one pass finds both."""
    best, tokens = logits.max(dim=-1)
    return Decoded(torch.where(best.isfinite(), tokens, -1).to(torch.int32), logits)


def bucket_list(max_rows: int) -> tuple[int, ...]:
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 513, 32)]
    return (*(s for s in sizes if s < max_rows), max_rows) if max_rows <= 512 else tuple(sizes)


class Rooms:
    """The sizes in which room for plans comes."""

    def __init__(self, shape: AttentionShape, split: SplitConfig) -> None:
        self._narrow_tokens = max(1, split.narrow_rows // shape.group)
        self._shared_tokens = max(1, split.tile_rows[-1] // shape.group)
        # Splitting aims for so many programs, and each item is one per KV head.
        self._extra = -(-int(split.num_sms * split.waves[0]) // shape.num_kv_heads)

    def max_slots(self, max_rows: int) -> int:
        narrow = 2 * max_rows + 4 * self._extra
        return narrow * self._narrow_tokens + _MAX_SHARED * self._shared_tokens

    def of(self, rows: int, work: WorkList) -> Capacity | None:
        """None: larger than any room."""
        narrow = self._narrow(rows, len(work.narrow))
        shared = _MIN_SHARED if len(work.shared) else 0
        while shared < len(work.shared):
            shared *= 2
        if narrow is None or shared > _MAX_SHARED or len(work.fills):
            return None
        slots = narrow * self._narrow_tokens + shared * self._shared_tokens
        return Capacity(rows, narrow, shared, 0, slots if work.num_slots else 0)

    def _narrow(self, rows: int, needed: int) -> int | None:
        extra = self._extra
        sizes = (rows, rows + extra, rows + 2 * extra, 2 * rows + 4 * extra)
        return next((size for size in sizes if size >= needed), None)


class DecodeGraphs:
    """Owns the graphs; `attention` must be used by nothing else."""

    def __init__(
        self,
        forward: Forward,
        attention: TritonAttention,
        rooms: Rooms,
        buckets: tuple[int, ...],
        bind: Bind,
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._rooms = rooms
        self.buckets = buckets
        self._bind = bind
        self._graphs: dict[tuple[Capacity, int], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.num_replays = 0

    def bucket(self, num_rows: int) -> int | None:
        return next((size for size in self.buckets if size >= num_rows), None)

    def find(self, bucket: int, work: WorkList) -> "_Graph | None":
        """The graph for a plan, with the plan in place; captured now if need be."""
        capacity = self._rooms.of(bucket, work)
        if capacity is None:
            return None
        key = (capacity, work.shared_rows)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(capacity, work)
        if graph.work is not work:
            graph.plan.upload(work)
            graph.work = work
        return graph

    def replay(self, graph: _Graph) -> Decoded:
        graph.graph.replay()
        self.num_replays += 1
        return graph.decoded

    def _capture(self, capacity: Capacity, work: WorkList) -> _Graph:
        plan = PlanBuffers(capacity, self._attention.device)
        plan.upload(work)
        token_ids, bound = self._bind(capacity.num_tokens, plan)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # What is compiled or set up at first use, is now.
            decode(self._forward(token_ids, self._attention, bound, None))
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            decoded = decode(self._forward(token_ids, self._attention, bound, None))
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        logger.debug("captured a graph for %s", capacity)
        return _Graph(graph, plan, decoded, work)
