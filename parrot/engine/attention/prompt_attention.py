"""Attention of the last tokens of a context by a compiled kernel, on a CPU that has one.

It takes half as long as products of whole matrices: scores stay in a core's cache, and those that
nobody sees are not computed."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from parrot.engine.attention.attend import Partial
from parrot.engine.kernels.cpu import prompt_layout as layout
from parrot.engine.kernels.cpu.native import Kernels

_MOST_KEYS = 1 << 15  # scores of more are in no cache


class PromptAttention:
    """Runs `Kernels.attend_prompt` in torch's threads."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernel = kernels.attend_prompt
        self._parallel = kernels.parallel
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def takes(self, q: torch.Tensor, num_keys: int) -> bool:
        """Whether there is a kernel for q [tokens, heads, head_dim]."""
        return (
            self._kernel is not None
            and q.dtype is torch.bfloat16
            and q.shape[-1] % layout.TILE_COLUMNS == 0
            and q.shape[0] >= layout.TILE_ROWS
            and num_keys <= _MOST_KEYS
        )

    def run(
        self, q: torch.Tensor, kv: torch.Tensor, num_keys: int, *, with_lse: bool = False
    ) -> Partial:
        """Attention of the last of `num_keys` tokens, each of which sees the keys up to its own.

        q [tokens, heads, head_dim], kv [2, kv_heads, at least `num_keys`, head_dim] -> out like q,
        and the natural log of the sum of the exponentials of the scores, float32 [tokens, heads]"""
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
        task = np.zeros(layout.PROMPT_FIELDS, dtype=np.int64)
        task[layout.QUERIES], task[layout.QUERY_STRIDE] = q.data_ptr(), q.stride(0) * q.itemsize
        task[layout.KEYS], task[layout.VALUES] = keys.data_ptr(), values.data_ptr()
        task[layout.OUT], task[layout.STATISTICS] = out.data_ptr(), statistics.data_ptr()
        task[layout.TOKENS], task[layout.NUM_KEYS] = num_tokens, num_keys
        task[layout.WIDTH], task[layout.HEAD_DIM] = width, head_dim
        task[layout.HEADS], task[layout.KV_HEADS] = heads, kv_heads
        task.view(np.float32)[2 * layout.QUERY_SCALE] = math.log2(math.e) * head_dim**-0.5
        task[layout.THREADS], task[layout.PARALLEL] = threads, self._parallel
        task[layout.SCRATCH] = self._room(threads * layout.scratch_bytes(width))
        self._kernel(task.ctypes.data)
        if not with_lse:
            return out, None
        return out, (statistics[..., 0] + statistics[..., 1].log2()) * math.log(2)

    def _room(self, num_bytes: int) -> int:
        if len(self._scratch) < num_bytes:
            self._scratch = self._scratch.new_empty(num_bytes)
        return self._scratch.data_ptr()


def _in_pairs(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as the kernel wants them, with zeros up to a whole tile."""
    if rest := -kv.shape[2] % layout.TILE_COLUMNS:
        kv = F.pad(kv, (0, 0, 0, rest))
    _, kv_heads, _, head_dim = kv.shape
    tiles = kv[0].view(torch.int32).view(kv_heads, -1, layout.TILE_COLUMNS, head_dim // 2)
    pairs = kv[1].view(kv_heads, -1, 2, head_dim)
    return tiles.transpose(2, 3).contiguous(), pairs.transpose(2, 3).contiguous()
