"""The KV that attention kernels read and the fused kernels write."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's KV and where each query stands in it.

    k, v       [pages, kv_heads, page_size, head_dim], contiguous; this step's KV is in
    tables     int32 [requests, pages], rows contiguous; one entry more than a request's pages
               is read, so the last column holds any valid page id and is never used
    positions  int32 [tokens]"""

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class NewKV:
    """This step's keys and values as they were computed, [tokens, kv_heads, head_dim] each, for
    attention that does not go through pages."""

    k: torch.Tensor
    v: torch.Tensor
