"""Attention over a part of a context, with the log-sum-exp that lets parts be merged."""

import torch

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, heads, rows, d], k and v [n, heads, length, d], mask broadcastable to
    [n, heads, rows, length] and added to the scores -> out like q, and the natural log of the sum
    of the exponentials of the scores, float32 [n, heads, rows]."""
    if q.device.type == "cpu":
        out, lse = _flash_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        return out, lse
    return attend_reference(q, k, v, mask=mask, is_causal=is_causal, scale=scale)


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain operations: any device, and the yardstick of the tests."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.float() * factor) @ k.float().transpose(-1, -2)
    if mask is not None:
        scores = scores + mask.float()
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v.float()
    return out.to(q.dtype), lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """outs [rows, parts, heads, d], lses [rows, parts, heads] -> [rows, heads, d].

    softmax over a union of keys is the mean of the softmaxes over the parts, weighted by exp(lse).
    An absent part has an lse of -inf."""
    weights = lses.softmax(dim=1).to(outs.dtype)
    return (outs * weights.unsqueeze(-1)).sum(dim=1)
