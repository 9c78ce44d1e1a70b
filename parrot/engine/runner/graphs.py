"""Steps as CUDA graphs.

A graph is captured for a size (rows, and rows with logits) and a capacity (the largest plan that it
holds). A step runs in the smallest graph that holds it; the unused rows and items do nothing. The
usual capacities are captured at load time. The eighth time that a plan needs another capacity, its
graph is captured. Until then the step uses a larger graph.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from parrot.engine.attention.tree_attention import Capacity, PlanBuffers, config_for
from parrot.engine.attention.triton_attention import TritonAttention
from parrot.engine.attention.work_list import SplitConfig, WorkList
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.runner.step_memory import GRAPH_TOKENS

logger = logging.getLogger(__name__)

_MAX_SHARED = 128  # Most shared items in a decode graph. Plans with more items run eagerly.
_MIN_SHARED = 8  # Fewest shared items in the capacity of a decode graph with shared items.

_CAPTURE_AFTER = 8  # A missing graph is captured when it is needed for this number of times.
# The least and the most time, in seconds, that launching an eager layer takes the CPU.
LAUNCH_S = 200e-6, 800e-6
# Tokens in the graphs of steps with prompts or drafts.
_MIXED = (
    *(8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792),
    GRAPH_TOKENS,
)
# Graphs of more rows copy their logits to a common buffer. With 128k tokens, a copy of 64 rows
# takes 8 us, and logits of their own would take 1.6 GB in all graphs of 80 to 256 rows.
_OWN_LOGITS = 64
_MAX_CONVERTED = 512  # Most converted pages in a graph. Plans with more pages run eagerly.


@dataclass(frozen=True, slots=True)
class StepSize:
    """The number of rows in a graph, and the number of rows with logits."""

    rows: int
    logits: int | None = None  # None for decodes: one token per sequence, logits for every row.


class Decoded(NamedTuple):
    """The model's results for each row with logits."""

    tokens: torch.Tensor  # The token of the largest logit; -1 if the logits are not finite.
    logits: torch.Tensor  # The logits of this rank's tokens.


Compute = Callable[[StepSize, PlanBuffers, TritonAttention], Decoded]


@dataclass(slots=True)
class Graph:
    graph: torch.cuda.CUDAGraph
    plan: PlanBuffers
    decoded: Decoded


def bucket_list(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows for which decode graphs are captured."""
    # Sizes of 16 or more are multiples of 16: other sizes make products of few rows slower.
    sizes = [1, 2, 4, 8, 16, 32, *range(48, 128, 16), *range(128, 513, 32)]
    return (*(s for s in sizes if s < max_rows), max_rows) if max_rows <= 512 else tuple(sizes)


def mixed_sizes(max_rows: int, max_tokens: int) -> tuple[StepSize, ...]:
    """The sizes of graphs for steps of up to `max_tokens` tokens with prompts or drafts."""
    return tuple(StepSize(n, min(n, max_rows)) for n in _MIXED if n <= max_tokens)


def limited(sizes: Sequence[StepSize], max_tokens: int) -> tuple[StepSize, ...]:
    """All sizes for decodes, and those of up to `max_tokens` tokens with prompts."""
    return tuple(s for s in sizes if s.logits is None or s.rows <= max_tokens)


class GraphCapacities:
    """The capacities for which graphs are captured."""

    def __init__(self, shape: AttentionShape, split: SplitConfig) -> None:
        self._narrow_tokens = max(1, split.narrow_rows // shape.group)
        self._tile_tokens = max(1, split.tile_rows // shape.group)
        self._kv_heads = shape.num_kv_heads
        self._config = config_for(shape)
        self._converted_pages = min(split.converted_pages, _MAX_CONVERTED)
        self._converted_tokens = -(-split.converted_rows // shape.group)
        # Splitting adds at most about this number of items: an item has one program per KV head.
        self._extra = -(-int(split.num_sms * split.waves[0]) // shape.num_kv_heads)

    def largest(self, size: StepSize) -> Capacity:
        """The largest capacity of the graphs of a size."""
        if size.logits is None:
            return self._decoding(size.rows, 2 * size.rows + 4 * self._extra, _MAX_SHARED)
        tiles = 2 * -(-size.rows // self._tile_tokens) + 2 * self._extra
        narrow = size.logits + 4 * self._extra
        slots = 4 * size.rows + narrow * self._narrow_tokens
        capacity = Capacity(size.rows, narrow, tiles, tiles, slots)
        if not self._converted_pages or size.rows < self._converted_tokens:
            return capacity
        return replace(capacity, converted_fills=tiles, converted_pages=self._converted_pages)

    def of(self, size: StepSize, work: WorkList) -> Capacity | None:
        """The capacity for a plan; None if the plan is too large or needs cuDNN."""
        largest = self.largest(size)
        if work.dense or not largest.holds(work):
            return None
        if size.logits is not None:
            if len(work.converted_fills):
                return largest
            return replace(largest, converted_fills=0, converted_pages=0)
        shared = _MIN_SHARED if len(work.shared) else 0
        while shared < len(work.shared):
            shared *= 2
        rows, extra = size.rows, self._extra
        sizes = (rows, rows + extra, rows + 2 * extra, largest.narrow)
        narrow = next(size for size in sizes if size >= len(work.narrow))
        capacity = self._decoding(rows, narrow, shared, has_slots=work.num_slots > 0)
        is_even = work.narrow_is_even and self._config.evenness_counts(narrow * self._kv_heads)
        return replace(capacity, is_even=is_even)

    def _decoding(self, rows: int, narrow: int, shared: int, *, has_slots: bool = True) -> Capacity:
        slots = narrow * self._narrow_tokens + shared * self._tile_tokens
        return Capacity(rows, narrow, shared, 0, slots if has_slots else 0)


class StepGraphs:
    """Owns the graphs and the buffers for their partial attention results."""

    def __init__(
        self,
        attention: TritonAttention,
        capacities: GraphCapacities,
        sizes: Sequence[StepSize],
        compute: Compute,
        *,
        is_alone: bool,
    ) -> None:
        """`sizes`: decodes by number of rows, then steps with prompts. `compute` must read a step's
        arrays from the same addresses every time. `is_alone`: no other rank runs the same steps."""
        self._attention = attention.sibling(max(capacities.largest(size).slots for size in sizes))
        self._capacities = capacities
        self.sizes = sizes
        self._compute = compute
        self._is_alone = is_alone
        self._graphs: dict[StepSize, dict[Capacity, Graph]] = {size: {} for size in sizes}
        self._num_missed: Counter[tuple[StepSize, Capacity]] = Counter()
        # All captures share a pool of memory and a stream: the allocator does not give memory that
        # one stream has freed to another.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # The logits of all graphs of many rows, [rows, tokens]. The next step overwrites them.
        self._logits: torch.Tensor | None = None
        self.num_replays = 0

    def limit(self, max_tokens: int) -> None:
        """Have no graphs for steps with prompts and more tokens. Call it before all captures."""
        self.sizes = limited(self.sizes, max_tokens)

    def size(self, num_rows: int, num_logits: int | None) -> StepSize | None:
        """The smallest size that holds a step; None if no size does."""
        for size in self.sizes:
            if (size.logits is None) == (num_logits is None) and size.rows >= num_rows:
                return size if (size.logits or 0) >= (num_logits or 0) else None
        return None

    def find(self, size: StepSize, work: WorkList) -> Graph | None:
        """A graph that holds a plan, after uploading the plan. None if no graph is large enough."""
        capacity = self._capacities.of(size, work)
        if capacity is None:
            return None
        graphs = self._graphs[size]
        graph = graphs.get(capacity)
        if graph is None:
            self._num_missed[size, capacity] += 1
            if self._num_missed[size, capacity] == _CAPTURE_AFTER:
                graph = self._captured_late(size, capacity, work)
            if graph is None:
                graph = next(
                    (graphs[r] for r in sorted(graphs, key=_launched) if r.holds(work)), None
                )
        if graph is not None and graph.plan.work is not work:
            graph.plan.upload(work)
        return graph

    def replay(self, graph: Graph) -> Decoded:
        graph.graph.replay()
        self.num_replays += 1
        return graph.decoded

    def prepare(self, size: StepSize, work: WorkList, *, largest: bool = False) -> None:
        """Capture a graph with the capacity for `work`, or with the `largest` capacity of `size`.

        Does nothing if the graph exists or no graph can run `work`."""
        capacity = self._capacities.largest(size) if largest else self._capacities.of(size, work)
        if capacity is not None and capacity not in self._graphs[size]:
            self._capture(size, capacity, work)

    def _captured_late(self, size: StepSize, capacity: Capacity, work: WorkList) -> Graph | None:
        """A new graph; None without memory for it."""
        try:
            return self._capture(size, capacity, work)
        except torch.OutOfMemoryError:
            if not self._is_alone:
                raise  # Other ranks have the graph, and all exchange arrays of its size.
            logger.warning("there is no memory for a graph for %s in %s", size, capacity)
            return None

    def _capture(self, size: StepSize, capacity: Capacity, work: WorkList) -> Graph:
        plan = PlanBuffers(work, self._attention.device, capacity)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Compile kernels and set up libraries: both are impossible during a capture.
            decoded = self._compute(size, plan, self._attention)
            if self._logits is None:
                num_rows = max(size.logits or size.rows for size in self.sizes)
                self._logits = decoded.logits.new_empty((num_rows, *decoded.logits.shape[1:]))
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                decoded = self._compute(size, plan, self._attention)
                if size.rows > _OWN_LOGITS:
                    decoded = decoded._replace(logits=self._kept(decoded.logits))
            except BaseException:
                # The stream must not stay in the capture: later captures use it.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        logger.debug("captured a graph for %s in %s", size, capacity)
        captured = self._graphs[size][capacity] = Graph(graph, plan, decoded)
        return captured

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits to the common buffer, so that their memory can be used again."""
        assert self._logits is not None, "the buffer is allocated before the first capture"
        return self._logits[: len(logits)].copy_(logits)


def _launched(capacity: Capacity) -> int:
    return capacity.narrow + capacity.shared + capacity.fills + capacity.converted_fills
