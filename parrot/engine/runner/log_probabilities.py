"""Log probabilities of tokens and of the most likely ones in their places."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.core.steps import SampleSpec, TokenScores
from parrot.protocol.sampling import Logprobs

_MAX_ROWS = 32  # at once: each takes twice a row of logits in float32


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Look up `tokens` [rows], and the `num_top` most likely ones, in the log-softmax of `logits`
    [rows, vocab], computed in float32.

    Returns int32 [rows, 2 * (1 + num_top)]: the ids, then the bits of their log probabilities.
    Rows whose token is -1 get anything."""
    parts = [slice(first, first + _MAX_ROWS) for first in range(0, len(logits), _MAX_ROWS)]
    return torch.cat([_score(logits[p].float(), tokens[p].long(), num_top) for p in parts])


def _score(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    top = logits.topk(num_top, dim=-1)
    ids = torch.cat([tokens.unsqueeze(1), top.indices], dim=1)
    chosen = logits.gather(1, ids[:, :1].clamp(min=0))
    values = torch.cat([chosen, top.values], dim=1) - logits.logsumexp(dim=-1, keepdim=True)
    return torch.cat([ids.int(), values.view(torch.int32)], dim=1)


def as_logprobs(scores: npt.NDArray[np.int32], num_top: int) -> Logprobs:
    """The rows of `scores`, as `score_tokens` gives them, with so many of the likely tokens."""
    own, width = 1 + num_top, scores.shape[1] // 2
    found = Logprobs(own)
    found.ids.frombytes(scores[:, :own].tobytes())
    found.values.frombytes(scores[:, width : width + own].tobytes())
    return found


def scores_of(specs: Sequence[SampleSpec], scores: npt.NDArray[np.int32]) -> dict[int, TokenScores]:
    """By job id; row i of `scores`, as `score_tokens` gives them, is for `specs[i]`."""
    width = scores.shape[1] // 2
    ids = scores[:, :width].tolist()
    values = scores[:, width:].view(np.float32).tolist()
    found: dict[int, TokenScores] = {}
    for row, spec in enumerate(specs):
        own = 1 + (spec.sampling.logprobs or 0)
        found[spec.job_id] = TokenScores(ids[row][:own], values[row][:own])
    return found
