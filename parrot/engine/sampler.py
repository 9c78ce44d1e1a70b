"""One token for each row of logits, by each row's own sampling settings.

The random number of a row is a hash of its (seed, step), used with the inverse of the cumulative
distribution: what a sequence gets never depends on what else is in the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.plan import SampleSpec, StepResult
from parrot.protocol.errors import ModelNumerics, ParrotError
from parrot.protocol.sampling import SamplingConfig

# Most of the probability is nearly always in this many tokens; if not, all are sorted.
_TOP_CANDIDATES = 1024


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> StepResult:
    """logits float32 [rows, vocab], changed in place; row i is for `specs[i]`."""
    # A sum is finite only if all its terms are: one pass, and no mask of the size of the logits.
    finite = logits.sum(dim=-1).isfinite()
    _adjust(logits, specs)
    tokens = _choose(logits, specs)
    best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1).isfinite()
    chosen: dict[int, int] = {}
    errors: dict[int, ParrotError] = {}
    rows = zip(specs, tokens.tolist(), finite.tolist(), best.tolist(), strict=True)
    for spec, token, is_finite, is_allowed in rows:
        if not is_finite:
            errors[spec.job_id] = not_finite()
        elif not is_allowed:
            errors[spec.job_id] = ModelNumerics("no token is left that may be sampled")
        else:
            chosen[spec.job_id] = token
    return StepResult(chosen, errors)


def not_finite() -> ModelNumerics:
    return ModelNumerics("the model's logits are not finite")


def uniform_numbers(seeds: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, step), by SplitMix64."""
    with np.errstate(over="ignore"):
        mixed = _mix(np.array(seeds, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        mixed = _mix(mixed + np.array(steps, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    numbers: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _adjust(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    """Penalties, then biases, then what is banned."""
    _penalize_repetition(logits, specs)
    additions = [entry for row, spec in enumerate(specs) for entry in _additions(row, spec)]
    if not additions:
        return
    rows, tokens, values = zip(*additions, strict=True)
    keep = [i for i, token in enumerate(tokens) if 0 <= token < logits.shape[1]]
    at = tuple(_tensor([column[i] for i in keep], logits, torch.long) for column in (rows, tokens))
    logits.index_put_(
        at, _tensor([values[i] for i in keep], logits, torch.float32), accumulate=True
    )


def _additions(row: int, spec: SampleSpec) -> list[tuple[int, int, float]]:
    """(row, token, value to add) as OpenAI defines its penalties and biases."""
    config = spec.sampling
    found: list[tuple[int, int, float]] = []
    if config.presence_penalty or config.frequency_penalty:
        tokens, counts = np.unique(np.asarray(spec.output_ids, dtype=np.int64), return_counts=True)
        penalties = config.presence_penalty + config.frequency_penalty * counts
        found += zip([row] * len(tokens), tokens.tolist(), (-penalties).tolist(), strict=True)
    if config.logit_bias:
        found += [(row, token, bias) for token, bias in config.logit_bias.items()]
    found += [(row, token, float("-inf")) for token in set(spec.banned_ids)]
    return found


def _penalize_repetition(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    """As in transformers: scores of all tokens of the context move away from it."""
    for row, spec in enumerate(specs):
        penalty = spec.sampling.repetition_penalty
        if penalty in (0.0, 1.0) or not len(spec.context_ids):
            continue
        seen = np.unique(np.asarray(spec.context_ids, dtype=np.int64))
        tokens = _tensor(seen[seen < logits.shape[1]], logits, torch.long)
        scores = logits[row, tokens]
        logits[row, tokens] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _choose(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    groups: dict[Callable[..., torch.Tensor], list[int]] = {}
    for row, spec in enumerate(specs):
        groups.setdefault(_strategy(spec.sampling), []).append(row)
    if list(groups) == [_greedy]:
        return _greedy(logits, specs)
    tokens = torch.empty(len(specs), dtype=torch.long, device=logits.device)
    for strategy, rows in groups.items():
        index = _tensor(rows, logits, torch.long)
        tokens[index] = strategy(logits[index], [specs[row] for row in rows])
    return tokens


def _strategy(config: SamplingConfig) -> Callable[..., torch.Tensor]:
    if config.is_greedy or config.top_k == 1:
        return _greedy
    if config.top_k is None and config.top_p == 1.0:
        return _from_all
    return _from_top


def _greedy(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _from_all(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Temperature and min-p only: no order among the tokens is needed."""
    probs = _softmax(logits, specs)
    return _draw(_at_least_min_p(probs, specs), specs)


def _from_top(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """top-k, then top-p of what is left, then min-p; on the most probable tokens in order."""
    vocab_size = logits.shape[1]
    probs = _softmax(logits, specs)
    top_k = _column([s.sampling.top_k or vocab_size for s in specs], probs).clamp_(max=vocab_size)
    top_p = _column([s.sampling.top_p for s in specs], probs)
    count = min(vocab_size, _TOP_CANDIDATES)
    best, tokens = probs.topk(count, dim=-1)
    enough = (best.sum(dim=-1, keepdim=True) >= top_p) | (top_k <= count)
    if not bool(enough.all()):
        best, tokens = probs.sort(dim=-1, descending=True)
    best = best.masked_fill(torch.arange(best.shape[1], device=best.device) >= top_k, 0.0)
    total = torch.where(top_k < vocab_size, best.sum(dim=-1, keepdim=True), 1.0)
    before = best.cumsum(dim=-1) - best
    best = best.masked_fill(before >= top_p * total, 0.0)
    return tokens.gather(1, _draw(_at_least_min_p(best, specs), specs).unsqueeze(1)).squeeze(1)


def _softmax(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """float64, so that sums over a large vocabulary do not round tokens away. Rows that are not
    finite become uniform; their token is not used."""
    temperatures = _column([max(s.sampling.temperature, 1e-6) for s in specs], logits)
    probs = (logits.double() / temperatures).softmax(dim=-1)
    return probs.nan_to_num_(nan=1.0 / logits.shape[1])


def _at_least_min_p(probs: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    if not any(s.sampling.min_p for s in specs):
        return probs
    floor = _column([s.sampling.min_p or 0.0 for s in specs], probs) * probs.amax(-1, keepdim=True)
    return probs.masked_fill(probs < floor, 0.0)


def _draw(weights: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """The index at which the running sum of a row first exceeds u times its total."""
    numbers = uniform_numbers([s.seed for s in specs], [s.step for s in specs])
    sums = weights.cumsum(dim=-1)
    targets = torch.from_numpy(numbers).to(weights.device).unsqueeze(1) * sums[:, -1:]
    found = torch.searchsorted(sums, targets, right=True)
    # Rounding may leave a target at the total: the last token that has any weight then.
    last = (weights.shape[1] - 1) - (weights > 0).flip(1).long().argmax(1, keepdim=True)
    return torch.minimum(found, last).squeeze(1)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _tensor(values: Any, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype, device=like.device)
