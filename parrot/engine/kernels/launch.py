"""The paged KV that kernels receive, and launch options that depend on the device."""

from dataclasses import dataclass
from functools import cache

import torch

# FLOP/s of matrix products in bfloat16 and in e4m3, measured on an H200.
MATRIX_RATE = 790e12
E4M3_RATE = 1530e12
_HOPPER = 9  # The major compute capability.


@cache
def starts_early(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch.

    A kernel then starts before the previous kernel on the stream has ended, and runs up to its
    `gdc_wait`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER


def early_launch(early: bool) -> dict[str, bool]:
    """The launch arguments of a kernel with the parameter DEPENDENT.

    All its programs must call `gdc_wait`. Otherwise the next kernel could start before the results
    of the previous kernel are visible."""
    return {"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False}


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's KV, and the position of each query token.

    k, v       [pages, kv_heads, page_size, head_dim], contiguous, with this step's KV
    tables     int32 [requests, pages], rows contiguous. Kernels prefetch one entry after a
               request's pages and never use it: it must be a valid page id
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
        """Assert the layout that kernels require."""
        for pages, exponents in ((self.k, self.k_exponents), (self.v, self.v_exponents)):
            assert pages.is_contiguous()
            assert (pages.dtype == torch.uint8) == (exponents is not None), pages.dtype
            if exponents is not None:
                assert exponents.shape == pages.shape[:-1], exponents.shape
                assert exponents.is_contiguous()


@dataclass(frozen=True, slots=True)
class NewKV:
    """This step's keys and values [tokens, kv_heads, head_dim], for attention without pages.

    With quantised pages, they are the numbers that the pages store."""

    k: torch.Tensor
    v: torch.Tensor
