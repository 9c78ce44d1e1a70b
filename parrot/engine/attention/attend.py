"""Attention as products of matrices, for any device and number of rows.

On a CPU that multiplies bfloat16, scores are computed in it: the flash attention that comes with
torch makes float32 of everything there, and takes twice as long."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

# Scores that are there at once, so that they stay in a core's cache; but at least so many rows are
# multiplied at a time.
SCORES = 1 << 20
LEAST_ROWS = 64
# And never more than these: of so many rows and 128k tokens, one head's.
_MOST_SCORES = LEAST_ROWS << 17

Partial = tuple[torch.Tensor, torch.Tensor | None]
"""Outputs [rows, heads, head_dim], and the natural log of the sum of exponentials [rows, heads],
which is only there to be merged by."""


@dataclass(frozen=True, slots=True)
class Causal:
    """The last of `num_keys` keys is that of the last token; `group` rows each.

    `mask` [rows of a block, its tokens] is added to a block's last scores."""

    num_keys: int
    group: int
    mask: torch.Tensor


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    with_lse: bool = False,
) -> Partial:
    """Attention over a part of a context, `with_lse` with what lets parts be merged.

    q [batch, rows, d], k and v [batch, keys, d] -> out like q, and the natural log of the sum of
    the exponentials of the scores, float32 [batch, rows]. `mask` [batch or 1, rows or 1, keys] is
    added to the scores."""
    (batch, num_rows, _), num_keys = q.shape, k.shape[1]
    step = min(num_rows, max(SCORES // (batch * num_keys), LEAST_ROWS))
    most = max(1, _MOST_SCORES // (step * num_keys))
    if batch > most:
        return _joined(
            [
                attend(q[at], k[at], v[at], mask=_part(mask, 0, at), with_lse=with_lse)
                for at in _slices(batch, most)
            ],
            0,
        )
    if num_rows > step:
        return _joined(
            [
                _attend(torch.baddbmm, q[:, at], k, v, _part(mask, 1, at), with_lse)
                for at in _slices(num_rows, step)
            ],
            1,
        )
    return _attend(torch.baddbmm, q, k, v, mask, with_lse)


def _slices(end: int, step: int) -> list[slice]:
    return [slice(first, first + step) for first in range(0, end, step)]


def _part(mask: torch.Tensor | None, dim: int, at: slice) -> torch.Tensor | None:
    if mask is None or mask.shape[dim] == 1:
        return mask
    return mask[at] if dim == 0 else mask[:, at]


def _joined(partials: Sequence[Partial], dim: int) -> Partial:
    lses = [lse for _, lse in partials if lse is not None]
    return torch.cat([out for out, _ in partials], dim), torch.cat(lses, dim) if lses else None


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal, *, with_lse: bool = False
) -> Partial:
    """`attend` for the last tokens of a context, each of which sees the keys up to its own.

    Skips the keys that a block of rows does not see. One head after the other: matrices of which
    only the beginning is used are not copied, batches of them are."""
    batch, num_rows, _ = q.shape
    block, group = len(causal.mask), causal.group
    out, lse = torch.empty_like(q), q.new_empty((batch, num_rows), dtype=torch.float32)
    for head, first in product(range(batch), range(0, num_rows, block)):
        end = min(first + block, num_rows)
        seen = causal.num_keys - (num_rows - end) // group
        mask = causal.mask[: end - first, : (end - first) // group]
        rows = q[head, first:end], k[head, :seen], v[head, :seen]
        out[head, first:end], sums = _attend(torch.addmm, *rows, mask, with_lse)
        if sums is not None:
            lse[head, first:end] = sums
    return out, lse if with_lse else None


def _attend(
    add_product: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    with_lse: bool,
) -> Partial:
    """`attend` for some rows of one head, without a batch, or of several. A mask of fewer keys is
    for the last ones.

    Scores are rounded to the type of q: so their products in bfloat16 take a third of the time."""
    scale = q.shape[-1] ** -0.5
    if mask is not None and mask.shape[-1] == k.shape[-2]:
        scores = add_product(mask, q, k.mT, alpha=scale)
    else:
        scores = add_product(q.new_empty(1), q, k.mT, beta=0, alpha=scale)
        if mask is not None:
            scores[..., -mask.shape[-1] :].add_(mask)
    if not with_lse:
        return scores.softmax(-1) @ v, None
    weights = scores.softmax(-1, dtype=torch.float32)
    lse = scores.amax(-1).float() - weights.amax(-1).log()
    return weights.to(v.dtype) @ v, lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """outs [rows, parts, heads, d], lses [rows, parts, heads] -> [rows, heads, d].

    softmax over a union of keys is the mean of the softmaxes over the parts, weighted by exp(lse).
    An absent part has an lse of -inf."""
    weights = lses.softmax(dim=1).to(outs.dtype)
    return (outs * weights.unsqueeze(-1)).sum(dim=1)
