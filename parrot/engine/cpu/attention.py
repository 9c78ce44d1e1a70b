"""Attention on a CPU with compiled kernels: over pages for few rows, and of long prompts.

The result of a row depends only on its own context, and not on other rows or on the threads."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from parrot.engine.attention.quantised import PooledKV
from parrot.engine.attention.torch_attention import Partial
from parrot.engine.attention.work_list import StepRows
from parrot.engine.cpu import layout, prompt_layout
from parrot.engine.cpu.native import Kernels
from parrot.engine.kernels.attention_shape import HeadNorm

HEAD_DIM_MULTIPLE = 32  # The kernels need a multiple of this head size.

_LEAST_PARALLEL = 1 << 18  # Below this number of bytes of KV, one thread is faster.
# Most keys for the prompt kernel. With more keys a tile's scores do not fit in a core's cache.
_MOST_KEYS = 1 << 15

Array = npt.NDArray[np.generic]


def address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class PagedAttention:
    """Attention of few rows over a pool [layers, 2, kv_heads, blocks, block_size, head_dim].

    It includes the norm and rotation of heads, and the write of new KV. The pool must be
    unquantised and have the type of the kernels."""

    def __init__(
        self,
        pool: PooledKV,
        num_heads: int,
        frequencies: torch.Tensor,
        norms: Sequence[HeadNorm | None],
        kernels: Kernels,
        max_rows: int,
    ) -> None:
        """`frequencies` float32 [head_dim / 2]: radians per position of dimensions i and
        i + head_dim / 2. `norms`: the head norm of each layer."""
        _, _, kv_heads, pages, page_size, head_dim = pool.numbers.shape
        assert pool.numbers.is_contiguous(), pool.numbers.stride()
        assert pool.exponents is None
        assert head_dim % HEAD_DIM_MULTIPLE == 0, head_dim
        self._attend = kernels.attend
        self._num_heads, self._head_dim = num_heads, head_dim
        self._frequencies = frequencies.numpy()
        self._span = -(-layout.CHUNK // page_size) * page_size
        self._token_bytes = 2 * kv_heads * head_dim * pool.numbers.itemsize
        self._kept: dict[int, Array] = {}  # Keeps arrays alive whose addresses are in the block.
        self._block = np.zeros(layout.STEP_FIELDS, dtype=np.int64)
        self._address = address_of(self._block)
        self._out = pool.numbers.new_empty(max_rows, num_heads * head_dim)
        self._angles = np.empty((max_rows, head_dim), dtype=np.float32)
        self._put(layout.ANGLES, self._angles)
        self._put(layout.QUERIES, np.empty(self._out.shape, dtype=np.float32))
        self._set(
            {
                layout.OUT: self._out.data_ptr(),
                layout.HEADS: num_heads,
                layout.KV_HEADS: kv_heads,
                layout.HEAD_DIM: head_dim,
                layout.PAGE_SIZE: page_size,
                layout.PAGES: pages,
                layout.SCORES_WIDTH: -(-self._span // 16) * 16,
                layout.PARALLEL: kernels.parallel,
                layout.ATTEND_PART: kernels.attend_part,
            }
        )
        scale = head_dim**-0.5 * math.log2(math.e)
        self._block.view(np.float32)[2 * layout.QUERY_SCALE] = scale
        self._layers = [
            _layer_block(numbers, norm) for numbers, norm in zip(pool.numbers, norms, strict=True)
        ]
        self._addresses = [address_of(block) for block, _ in self._layers]

    def prepare(self, step: StepRows) -> None:
        """Set the step for the following calls of `run`."""
        starts, q_lens = step.starts, step.q_lens
        positions = step.positions
        num_rows = len(positions)
        num_chunks = (starts + q_lens - 1) // self._span + 1
        pairs = np.repeat(np.arange(len(starts), dtype=np.int32), num_chunks)
        firsts = np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
        most_chunks = int(num_chunks.max())
        num_bytes = int((starts + q_lens).sum()) * self._token_bytes
        is_parallel = self._block[layout.PARALLEL] and num_bytes >= _LEAST_PARALLEL
        threads = torch.get_num_threads() if is_parallel else 1
        self._set(
            {
                layout.ROWS: num_rows,
                layout.PAIRS: len(pairs),
                layout.THREADS: threads,
                layout.MOST_CHUNKS: most_chunks,
                layout.TABLE_WIDTH: step.tables.shape[1],
            }
        )
        self._put(layout.PAIR_SEQUENCES, pairs)
        self._put(layout.PAIR_CHUNKS, (np.arange(len(pairs)) - firsts).astype(np.int32))
        self._put(layout.FIRST_ROWS, np.append(step.q_first, num_rows).astype(np.int32))
        self._put(layout.STARTS, starts)
        self._put(layout.ROW_SEQUENCES, step.requests)
        self._put(layout.TABLES, step.tables)
        self._rotate(positions)
        partials = num_rows * most_chunks * self._num_heads
        self._make_room(layout.PARTIALS, partials * self._head_dim)
        self._make_room(layout.STATISTICS, partials * 2)
        self._make_room(layout.SCORES, threads * 4 * int(self._block[layout.SCORES_WIDTH]))

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write the new KV and compute attention.

        qkv [rows, (heads + 2 * kv_heads) * head_dim], the result of the product ->
        [rows, heads * head_dim]. The next call overwrites the result."""
        self._attend(qkv.data_ptr(), self._address, self._addresses[layer])
        return self._out[: len(qkv)]

    def _rotate(self, positions: npt.NDArray[np.int32]) -> None:
        half = len(self._frequencies)
        angles = np.multiply.outer(positions.astype(np.float32), self._frequencies)
        np.cos(angles, out=self._angles[: len(positions), :half])
        np.sin(angles, out=self._angles[: len(positions), half:])

    def _set(self, values: dict[int, int]) -> None:
        for field, value in values.items():
            self._block[field] = value

    def _put(self, field: int, array: Array) -> None:
        self._kept[field] = array = np.ascontiguousarray(array)
        self._block[field] = address_of(array)

    def _make_room(self, field: int, size: int) -> None:
        if field not in self._kept or self._kept[field].size < size:
            self._put(field, np.empty(size * 5 // 4, dtype=np.float32))


def _layer_block(numbers: torch.Tensor, norm: HeadNorm | None) -> tuple[Array, object]:
    """The block of a layer with keys and values [2, ...], and an owner of its addresses."""
    block = np.zeros(layout.LAYER_FIELDS, dtype=np.int64)
    block[layout.K_POOL], block[layout.V_POOL] = (part.data_ptr() for part in numbers)
    if norm is None:
        return block, None
    weights = norm.q_weight.float().contiguous(), norm.k_weight.float().contiguous()
    block[layout.Q_NORM], block[layout.K_NORM] = (weight.data_ptr() for weight in weights)
    block.view(np.float32)[2 * layout.NORM_EPS] = norm.eps
    return block, weights


class PromptAttention:
    """Attention of a context's last tokens, on CPUs with AVX512_BF16, in torch's threads.

    It takes half the time of torch's matrix products: scores stay in a core's cache, and hidden
    scores are not computed."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernel = kernels.attend_prompt
        self._parallel = kernels.parallel
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def takes(self, q: torch.Tensor, num_keys: int) -> bool:
        """Whether the kernel exists and supports q [tokens, heads, head_dim]."""
        return (
            self._kernel is not None
            and q.dtype is torch.bfloat16
            and q.shape[-1] % prompt_layout.TILE_COLUMNS == 0
            and q.shape[0] >= prompt_layout.TILE_ROWS
            and num_keys <= _MOST_KEYS
        )

    def run(
        self, q: torch.Tensor, kv: torch.Tensor, num_keys: int, *, with_lse: bool = False
    ) -> Partial:
        """Causal attention of the last of `num_keys` tokens.

        q [tokens, heads, head_dim], kv [2, kv_heads, at least `num_keys`, head_dim] -> out like q,
        and the natural log-sum-exp of the scores, float32 [tokens, heads]."""
        assert self._kernel is not None
        num_tokens, heads, head_dim = q.shape
        kv_heads = kv.shape[1]
        if q.stride()[1:] != (head_dim, 1):
            q = q.contiguous()
        keys, values = _in_pairs(kv[:, :, :num_keys])
        width = values.shape[1] * 2
        out = q.new_empty(q.shape)
        statistics = q.new_empty((num_tokens, heads, 2), dtype=torch.float32)
        threads = torch.get_num_threads() if self._parallel else 1
        task = np.zeros(prompt_layout.PROMPT_FIELDS, dtype=np.int64)
        task[prompt_layout.QUERIES], task[prompt_layout.QUERY_STRIDE] = (
            q.data_ptr(),
            q.stride(0) * q.itemsize,
        )
        task[prompt_layout.KEYS], task[prompt_layout.VALUES] = keys.data_ptr(), values.data_ptr()
        task[prompt_layout.OUT], task[prompt_layout.STATISTICS] = (
            out.data_ptr(),
            statistics.data_ptr(),
        )
        task[prompt_layout.TOKENS], task[prompt_layout.NUM_KEYS] = num_tokens, num_keys
        task[prompt_layout.WIDTH], task[prompt_layout.HEAD_DIM] = width, head_dim
        task[prompt_layout.HEADS], task[prompt_layout.KV_HEADS] = heads, kv_heads
        task.view(np.float32)[2 * prompt_layout.QUERY_SCALE] = math.log2(math.e) * head_dim**-0.5
        task[prompt_layout.THREADS], task[prompt_layout.PARALLEL] = threads, self._parallel
        task[prompt_layout.SCRATCH] = self._room(threads * prompt_layout.scratch_bytes(width))
        self._kernel(task.ctypes.data)
        if not with_lse:
            return out, None
        return out, (statistics[..., 0] + statistics[..., 1].log2()) * math.log(2)

    def _room(self, num_bytes: int) -> int:
        if len(self._scratch) < num_bytes:
            self._scratch = self._scratch.new_empty(num_bytes)
        return self._scratch.data_ptr()


def _in_pairs(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in the layout of `prompt_layout`, padded with zeros to a whole tile."""
    if rest := -kv.shape[2] % prompt_layout.TILE_COLUMNS:
        kv = F.pad(kv, (0, 0, 0, rest))
    _, kv_heads, _, head_dim = kv.shape
    tiles = kv[0].view(torch.int32).view(kv_heads, -1, prompt_layout.TILE_COLUMNS, head_dim // 2)
    pairs = kv[1].view(kv_heads, -1, 2, head_dim)
    return tiles.transpose(2, 3).contiguous(), pairs.transpose(2, 3).contiguous()
