"""The paged KV that launches take, and their options that depend on the device."""

from dataclasses import dataclass
from functools import cache

import torch

MATRIX_RATE = 790e12
"""FLOP/s of bfloat16 products, measured on an H200."""


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start, as far as its `gdc_wait`, before the one in front of it on the
    stream has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(early: bool) -> dict[str, bool]:
    """The launch arguments of a kernel that knows whether it is DEPENDENT. All its programs must
    wait, or the kernel after it might not find what the one before it wrote."""
    return {"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False}


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's KV and where each query stands in it.

    k, v       [pages, kv_heads, page_size, head_dim], contiguous; this step's KV is in
    tables     int32 [requests, pages], rows contiguous; one entry more than a request's pages
               is read, so the last column holds any valid page id and is never used
    positions  int32 [tokens]

    Quantised KV (`attention.quantised`) are uint8 codes, with k_exponents and v_exponents uint8
    [pages, kv_heads, page_size], contiguous."""

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    k_exponents: torch.Tensor | None = None
    v_exponents: torch.Tensor | None = None

    @property
    def is_quantised(self) -> bool:
        return self.k_exponents is not None

    def check(self) -> None:
        """Assert what kernels rely on."""
        for pages, exponents in ((self.k, self.k_exponents), (self.v, self.v_exponents)):
            assert pages.is_contiguous()
            assert (pages.dtype == torch.uint8) == (exponents is not None), pages.dtype
            if exponents is not None:
                assert exponents.shape == pages.shape[:-1], exponents.shape
                assert exponents.is_contiguous()


@dataclass(frozen=True, slots=True)
class NewKV:
    """This step's keys and values [tokens, kv_heads, head_dim], for attention that does not go
    through pages: as they were computed, or as the pages have them where these are quantised."""

    k: torch.Tensor
    v: torch.Tensor
