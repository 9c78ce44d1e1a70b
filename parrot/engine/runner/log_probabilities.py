"""Log probabilities of chosen tokens and of the most likely alternatives."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.core.steps import SampleSpec, TokenScores
from parrot.protocol.sampling import Logprobs

# Largest number of rows that are computed at once. A row takes two rows of float32 logits.
_MAX_ROWS = 32


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """The log-softmax, in float32, of `tokens` [rows] and of the `num_top` most likely tokens.

    `logits` [rows, vocab] -> int32 [rows, 2 * (1 + num_top)]: the ids, then the bits of the float32
    log probabilities. The result is undefined for rows whose token is -1."""
    parts = [slice(first, first + _MAX_ROWS) for first in range(0, len(logits), _MAX_ROWS)]
    return torch.cat([_score(logits[p].float(), tokens[p].long(), num_top) for p in parts])


def _score(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    top = logits.topk(num_top, dim=-1)
    ids = torch.cat([tokens.unsqueeze(1), top.indices], dim=1)
    chosen = logits.gather(1, ids[:, :1].clamp(min=0))
    values = torch.cat([chosen, top.values], dim=1) - logits.logsumexp(dim=-1, keepdim=True)
    return torch.cat([ids.int(), values.view(torch.int32)], dim=1)


def as_logprobs(scores: npt.NDArray[np.int32], num_top: int) -> Logprobs:
    """Convert a result of `score_tokens`, with the first `num_top` alternatives of each row."""
    own, width = 1 + num_top, scores.shape[1] // 2
    found = Logprobs(own)
    found.ids.frombytes(scores[:, :own].tobytes())
    found.values.frombytes(scores[:, width : width + own].tobytes())
    return found


def scores_of(specs: Sequence[SampleSpec], scores: npt.NDArray[np.int32]) -> dict[int, TokenScores]:
    """Convert a result of `score_tokens`, in which row i is for `specs[i]`. By job id."""
    width = scores.shape[1] // 2
    ids = scores[:, :width].tolist()
    values = scores[:, width:].view(np.float32).tolist()
    found: dict[int, TokenScores] = {}
    for row, spec in enumerate(specs):
        own = 1 + (spec.sampling.logprobs or 0)
        found[spec.job_id] = TokenScores(ids[row][:own], values[row][:own])
    return found
