"""Random positions for rotated q and k, and a comparison with the kernel that rotates a whole
product.

Import this module after the choice of Triton's interpreter."""

import torch

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import rope_and_store
from parrot.engine.kernels.launch import KVView
from parrot.engine.models.fused_weights import Where
from tests.support.kernel_cases import relative_error

# Number of blocks, of sequences, and of positions in a sequence.
_BLOCKS, _TABLES, _LENGTH = 12, 4, 40


class Rotation:
    """`where` has the arguments of the kernel under test. Each row is the next token of a
    sequence."""

    def __init__(self, shape: AttentionShape, num_rows: int, generator: torch.Generator) -> None:
        positions = torch.randint(_LENGTH, (num_rows,), generator=generator).to(torch.int32)
        table_rows = (torch.arange(num_rows) % _TABLES).to(torch.int32)
        tables = torch.randperm(_BLOCKS, generator=generator).view(_TABLES, -1).to(torch.int32)
        cos_sin = torch.rand(64, shape.head_dim, generator=generator)
        size = (_BLOCKS + 1, shape.num_kv_heads, shape.page_size, shape.head_dim)
        pools = [torch.full(size, float("nan")) for _ in range(4)]
        kv, self._kv = (KVView(*two, tables, positions) for two in (pools[:2], pools[2:]))
        self.where: Where = kv, table_rows, cos_sin, shape

    def check(self, q: torch.Tensor, qkv: torch.Tensor) -> None:
        """Rotate the product [q | k | v] with the reference kernel, and compare `q` and the stored
        KV."""
        kv, table_rows, cos_sin, shape = self.where
        expected, _ = rope_and_store(qkv.float(), self._kv, table_rows, cos_sin, shape)
        assert relative_error(q, expected.double()) < 1e-5
        for ours, theirs in ((kv.k, self._kv.k), (kv.v, self._kv.v)):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert relative_error(ours.nan_to_num(), theirs.nan_to_num().double()) < 1e-5
