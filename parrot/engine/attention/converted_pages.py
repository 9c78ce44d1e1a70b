"""Pages of quantised KV, converted to the type of q for fills so long that converting what each of
their tiles reads would take longer than the attention."""

import torch
import triton

from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.quantised_kernels import convert_pages_kernel

_MAX_BYTES = 512 << 20
_SHARE_OF_POOL = 4
_BLOCK_ROWS = 32


class ConvertedPages:
    """Owns room for `num_pages` converted pages of one layer, which all layers use in turn."""

    def __init__(self, num_pages: int, page: torch.Size, like: torch.Tensor) -> None:
        """`page`: [kv_heads, page_size, head_dim]; `like`: of the type and device of q."""
        self.k, self.v = (like.new_empty((num_pages, *page)) for _ in "kv")
        # Row r of this table has the pages from r on. The last entry is read ahead, never used.
        self._table = torch.arange(num_pages + 1, dtype=torch.int32, device=like.device)[:, None]

    @classmethod
    def of(cls, codes: torch.Tensor, dtype: torch.dtype) -> "ConvertedPages":
        """Room that is small beside a pool [layers, 2, pages, kv_heads, page_size, head_dim]."""
        _, _, num_pages, *page = codes.shape
        like = torch.empty(0, dtype=dtype, device=codes.device)
        page_bytes = 2 * torch.Size(page).numel() * like.element_size()
        num_converted = min(num_pages // _SHARE_OF_POOL, _MAX_BYTES // page_bytes)
        return cls(num_converted, torch.Size(page), like)

    def __len__(self) -> int:
        return len(self.k)

    def convert(self, kv: KVView, pages: torch.Tensor) -> KVView:
        """Convert these pages of a quantised layer (int32; -1: none), in order. Row r of the
        result's block table begins with the r-th of them."""
        assert len(pages) <= len(self), (len(pages), len(self))
        num_rows = self.k[0, ..., 0].numel()
        convert_pages_kernel[(len(pages), triton.cdiv(num_rows, _BLOCK_ROWS))](
            kv.k,
            kv.v,
            kv.k_exponents,
            kv.v_exponents,
            pages,
            self.k,
            self.v,
            ROWS=num_rows,
            D=self.k.shape[-1],
            BLOCK=_BLOCK_ROWS,
            num_warps=4,
        )
        return KVView(self.k, self.v, self._table, kv.positions)
