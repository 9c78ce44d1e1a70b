"""Attention steps to time: decodes of requests with shared prefixes, over random KV in pages in
random order. Runs rotate over several pools, so that no run finds its KV in the L2 cache."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.timing import time_graph
from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.quantised import dequantise, quantise
from parrot.engine.attention.tree_attention import (
    ConvertedPages,
    KernelConfig,
    PlanBuffers,
    TreeAttention,
    split_for,
)
from parrot.engine.attention.work_list import SplitConfig, StepRows, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.launch import MATRIX_RATE, KVView

PAGE = 64
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Workload:
    """A tree of shared prefixes. `levels`: (requests per node, tokens) from the root down.
    `suffix`: each request's own tokens, including its newest one. One level (batch, 6144) is a
    single system prompt."""

    batch: int
    levels: tuple[tuple[int, int], ...]
    suffix: int
    spread: int = 0

    def suffixes(self) -> list[int]:
        if not self.spread:
            return [self.suffix] * self.batch
        random = np.random.default_rng(0)
        lows, highs = self.suffix - self.spread, self.suffix + self.spread
        return random.integers(lows, highs + 1, self.batch).tolist()

    @property
    def unique_tokens(self) -> int:
        shared = sum(-(-self.batch // sharers) * tokens for sharers, tokens in self.levels)
        return shared + sum(self.suffixes())

    @property
    def context_tokens(self) -> int:
        return self.batch * sum(tokens for _, tokens in self.levels) + sum(self.suffixes())


def floor_us(work: Workload, shape: AttentionShape) -> float:
    """The time to read unique KV and q and to write the output, or to compute if longer."""
    moved = work.unique_tokens * shape.kv_token_bytes
    moved += work.batch * shape.num_heads * shape.head_dim * 4
    operations = 4 * shape.num_heads * shape.head_dim * work.context_tokens
    return max(moved / MEMORY_RATE, operations / MATRIX_RATE) * 1e6


def step_rows(work: Workload, page: int, *, seed: int = 0) -> tuple[StepRows, int]:
    """The block tables of the workload, and their number of pages."""
    shared = [tokens // page for _, tokens in work.levels]
    own = [-(-tokens // page) for tokens in work.suffixes()]
    width = sum(shared) + max(own) + 1
    tables = np.zeros((work.batch, width), dtype=np.int32)
    used, column = 0, 0
    for (sharers, _), pages in zip(work.levels, shared, strict=True):
        for first in range(0, work.batch, sharers):
            tables[first : first + sharers, column : column + pages] = used + np.arange(pages)
            used += pages
        column += pages
    for row, pages in enumerate(own):
        tables[row, column : column + pages] = used + np.arange(pages)
        used += pages
    places = np.random.default_rng(seed).permutation(used).astype(np.int32)
    context = sum(shared) * page + np.array(work.suffixes())
    step = StepRows(
        places[tables], (context - 1).astype(np.int32), np.ones(work.batch, dtype=np.int32)
    )
    return step, used


def fill_step(
    tokens: int, start: int, sequences: int, shape: AttentionShape, *, shared: bool = False
) -> tuple[StepRows, KVView, torch.Tensor]:
    """Sequences that each compute `tokens` tokens after `start` cached ones, own or shared."""
    page = shape.page_size
    width = -(-(start + tokens) // page)
    tables = np.random.default_rng(0).permutation(sequences * width).astype(np.int32)
    tables = tables.reshape(sequences, width)
    if shared:
        tables[:, : start // page] = tables[0, : start // page]
    tables = np.concatenate((tables, tables[:, :1]), axis=1)
    counts = [np.full(sequences, n, dtype=np.int32) for n in (start, tokens)]
    positions = torch.arange(start, start + tokens, dtype=torch.int32).repeat(sequences)
    places = torch.from_numpy(tables).cuda(), positions.cuda()
    layer = random_kv(sequences * width, shape, *places)
    q = normal(sequences * tokens, shape.num_heads, shape.head_dim)
    return StepRows(tables, *counts), layer, q


def random_kv(
    pages: int, shape: AttentionShape, tables: torch.Tensor, positions: torch.Tensor
) -> KVView:
    """Random KV of one layer, quantised if the shape requires it."""
    size = (pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    if shape.number_bytes == 2:
        return KVView(normal(*size), normal(*size), tables, positions)
    (k, k_exponents), (v, v_exponents) = (quantise(normal(*size)) for _ in "kv")
    return KVView(k, v, tables, positions, k_exponents, v_exponents)


def normal(*size: int, std: float = 1.0) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_(std=std)


def split_of(shape: AttentionShape) -> SplitConfig:
    """The engine's split into items, but with no fills for cuDNN."""
    room = 2048 if shape.number_bytes == 1 else 0
    split = split_for(shape, torch.bfloat16, DEVICE, converted_pages=room)
    return replace(split, dense=None)


def prepared(
    work: WorkList, shape: AttentionShape, config: KernelConfig | None = None
) -> tuple[TreeAttention, PlanBuffers]:
    page = torch.Size((shape.num_kv_heads, shape.page_size, shape.head_dim))
    converted = ConvertedPages(len(work.converted_pages), page, normal(0))
    attention = TreeAttention(shape, work.num_slots, DEVICE, config, converted=converted)
    return attention, PlanBuffers(work, DEVICE)


class Bench:
    """A workload's tensors on the device, which all plans use."""

    def __init__(self, work: Workload, shape: AttentionShape, *, pools: int = 3) -> None:
        self.work, self.shape = work, shape
        self.step, pages = step_rows(work, shape.page_size)
        tables = torch.from_numpy(self.step.tables).cuda()
        positions = torch.from_numpy(self.step.starts).cuda()
        self.layers = [random_kv(pages, shape, tables, positions) for _ in range(pools)]
        self.q = normal(work.batch, shape.num_heads, shape.head_dim)
        self.out = torch.empty_like(self.q)

    def plan(self, gate: GateConfig | None) -> WorkList:
        return plan_work(self.step, self.shape, gate, split_of(self.shape))

    def time_us(self, work: WorkList, config: KernelConfig | None = None) -> float:
        """Microseconds of one layer, rotating over the pools."""
        attention, plan = prepared(work, self.shape, config)

        def run() -> None:
            for _ in range(4):
                for layer in self.layers:
                    attention.run(self.q, layer, plan, self.out)

        return time_graph(run, per_run=4 * len(self.layers), replays=15)

    def error(self, work: WorkList, requests: int = 4) -> float:
        """The relative error of the plan's outputs for several requests, against float64."""
        attention, plan = prepared(work, self.shape)
        self.out.fill_(float("nan"))
        attention.run(self.q, self.layers[0], plan, self.out)
        picks = np.linspace(0, self.work.batch - 1, requests).astype(int).tolist()
        expected = torch.stack([self._answer(self.layers[0], row) for row in picks])
        actual = self.out[picks].double()
        return float((actual - expected).norm() / expected.norm())

    def _answer(self, layer: KVView, row: int) -> torch.Tensor:
        length = int(self.step.starts[row]) + 1
        pages = torch.from_numpy(self.step.tables[row]).cuda()[: -(-length // self.shape.page_size)]
        k, v = layer.k[pages], layer.v[pages]
        if layer.k_exponents is not None and layer.v_exponents is not None:
            k = dequantise(k, layer.k_exponents[pages], torch.float32)
            v = dequantise(v, layer.v_exponents[pages], torch.float32)
        k, v = (x.transpose(1, 2).flatten(0, 1)[:length].double() for x in (k, v))
        q = self.q[row].double().view(self.shape.num_kv_heads, self.shape.group, -1)
        scores = torch.einsum("hgd,shd->hgs", q, k) * self.shape.head_dim**-0.5
        return torch.einsum("hgs,shd->hgd", scores.softmax(-1), v).flatten(0, 1)
