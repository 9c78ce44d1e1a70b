"""Samples a token for each row of logits, in torch.

The sampled token has the largest sum of scaled logit and noise (noise.py) among the tokens that
top-k, top-p and min-p keep. Tokens with equal logits are kept or dropped together."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from parrot.engine.core.steps import SampleSpec, StepResult
from parrot.engine.kernels.noise import gumbel_noise, noise_keys
from parrot.engine.runner.inputs import MIN_TEMPERATURE, masked_rows, masks_of
from parrot.engine.runner.log_probabilities import score_tokens, scores_of
from parrot.protocol.errors import ModelNumerics, ParrotError
from parrot.protocol.sampling import ResolvedSampling

# Top-k and top-p first look at this number of tokens. If these are too few, all tokens are sorted.
_TOP_CANDIDATES = 1024


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> StepResult:
    """Sample from `logits` float32 [rows, vocab]. Row i is for `specs[i]`. Changes `logits`."""
    # A sum is finite only if all terms are. This needs one pass and no mask as large as the logits.
    finite = logits.sum(dim=-1).isfinite()
    scored = [row for row, spec in enumerate(specs) if spec.sampling.logprobs is not None]
    plain = logits[scored] if scored else logits
    _adjust(logits, specs)
    tokens = torch.where(finite, _choose(logits, specs), -1)
    if not scored:
        return results(specs, tokens.tolist())
    wanted = [specs[row] for row in scored]
    num_top = max([spec.sampling.logprobs or 0 for spec in wanted])
    looked_up = score_tokens(plain, tokens[scored], num_top).cpu().numpy()
    return results(specs, tokens.tolist(), wanted, looked_up)


def needs_logits(specs: Sequence[SampleSpec | None]) -> bool:
    """Whether a sample needs more than the token of its largest logit."""
    return any(spec is not None and not _is_greedy(spec) for spec in specs)


def _is_greedy(spec: SampleSpec) -> bool:
    config = spec.sampling
    is_plain = config.logprobs is None and not config.adjusts_logits and spec.constraint is None
    return is_plain and config.takes_the_largest


def results(
    specs: Sequence[SampleSpec],
    tokens: Sequence[int],
    scored: Sequence[SampleSpec] = (),
    looked_up: npt.NDArray[np.int32] | None = None,
) -> StepResult:
    """The result of a step. `tokens[i]` is for `specs[i]`, and -1 if the logits are not finite.

    The specs of a job are consecutive, each with one more draft. A token counts only if all drafts
    before it equal the sampled tokens. `looked_up` is the result of `score_tokens` for `scored`."""
    scores = {} if looked_up is None else scores_of(scored, looked_up)
    chosen = {spec.job_id: token for spec, token in zip(specs, tokens, strict=True)}
    if len(chosen) == len(specs) and min(tokens) >= 0:
        return StepResult(chosen, {}, scores=scores)
    chosen.clear()
    errors: dict[int, ParrotError] = {}
    further: dict[int, Sequence[int]] = {}
    before: list[int] = []
    for spec, token in zip(specs, tokens, strict=True):
        if spec.drafts:
            if token >= 0 and len(before) == len(spec.drafts) and before[-1] == spec.drafts[-1]:
                before.append(token)
                further[spec.job_id] = before[1:]
        elif token >= 0:
            chosen[spec.job_id] = token
            before = [token]
        else:
            errors[spec.job_id] = ModelNumerics("the model's logits are not finite")
            before = []
    return StepResult(chosen, errors, scores=scores, further=further)


def _adjust(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
    """Apply penalties and biases, then the masks of constraints."""
    if any(spec.sampling.adjusts_logits for spec in specs):
        for row, spec in enumerate(specs):
            _penalize_repetition(logits, row, spec)
        _add_penalties_and_biases(logits, specs)
    constrained = masked_rows(specs, [None] * len(specs))
    masks = masks_of(constrained) if constrained else None
    if masks is not None:
        bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")
        rows = _tensor(masks.rows, logits, torch.long)
        is_allowed = _tensor(_fitted(bits, logits.shape[1]), logits, torch.bool)
        logits[rows] = logits[rows].masked_fill_(~is_allowed, -math.inf)


def _fitted(bits: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
    """Cut or zero-pad `bits` to [rows, width]."""
    return np.pad(bits[:, :width], ((0, 0), (0, max(0, width - bits.shape[1]))))


def _add_penalties_and_biases(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
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
    """(row, token, value to add) for OpenAI's penalties and biases."""
    config = spec.sampling
    found: list[tuple[int, int, float]] = []
    if config.presence_penalty or config.frequency_penalty:
        output = np.array([*spec.resumed_ids, *spec.output_ids, *spec.drafts], dtype=np.int64)
        tokens, counts = np.unique(output, return_counts=True)
        penalties = config.presence_penalty + config.frequency_penalty * counts
        found += zip([row] * len(tokens), tokens.tolist(), (-penalties).tolist(), strict=True)
    if config.logit_bias:
        found += [(row, token, bias) for token, bias in config.logit_bias.items()]
    return found


def _penalize_repetition(logits: torch.Tensor, row: int, spec: SampleSpec) -> None:
    """Apply the repetition penalty to all tokens of the context, like transformers."""
    penalty = spec.sampling.repetition_penalty
    if penalty in (0.0, 1.0) or not len(spec.context_ids):
        return
    seen = np.unique(np.array([*spec.context_ids, *spec.drafts], dtype=np.int64))
    tokens = _tensor(seen[seen < logits.shape[1]], logits, torch.long)
    scores = logits[row, tokens]
    logits[row, tokens] = torch.where(scores < 0, scores * penalty, scores / penalty)


def _choose(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    drawn = [row for row, spec in enumerate(specs) if not spec.sampling.takes_the_largest]
    if len(drawn) == len(specs):
        return _draw(logits, specs)
    tokens = logits.argmax(dim=-1)
    if drawn:
        rows = _tensor(drawn, logits, torch.long)
        tokens[rows] = _draw(logits[rows], [specs[row] for row in drawn])
    return tokens


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Sample with noise. The token of a row that is not finite is undefined."""
    inverse = [1.0 / max(s.sampling.temperature, MIN_TEMPERATURE) for s in specs]
    scores = (logits - logits.amax(dim=-1, keepdim=True)).mul_(_column(inverse, logits))
    floors = _floors(scores, [s.sampling for s in specs])
    noise = gumbel_noise(
        _tensor(noise_keys([s.seed for s in specs], [s.position for s in specs]), logits, None),
        logits.shape[1],
    )
    noise.add_(scores)
    if floors is not None:
        noise.masked_fill_(scores < floors, -math.inf)
    return noise.argmax(dim=-1)


def _floors(scores: torch.Tensor, configs: Sequence[ResolvedSampling]) -> torch.Tensor | None:
    """The lowest score [rows, 1] that may be sampled; None if all may."""
    vocab_size = scores.shape[1]
    found = None
    if any(c.min_p for c in configs):
        floors = [math.log(c.min_p) if c.min_p else -math.inf for c in configs]
        found = _column(floors, scores)
    if all((c.top_k or vocab_size) >= vocab_size and c.top_p == 1.0 for c in configs):
        return found
    top_k = _tensor([min(c.top_k or vocab_size, vocab_size) for c in configs], scores, torch.long)
    top_p = torch.tensor([c.top_p for c in configs], dtype=torch.float64, device=scores.device)
    count = min(vocab_size, _TOP_CANDIDATES)
    lowest = _lowest_kept(scores, scores.topk(count, dim=-1).values, top_k, top_p)
    if lowest is None:
        ordered = scores.sort(dim=-1, descending=True).values
        lowest = _lowest_kept(scores, ordered, top_k, top_p)
        assert lowest is not None
    return lowest if found is None else torch.maximum(lowest, found)


def _lowest_kept(
    scores: torch.Tensor, best: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor | None:
    """The lowest score after top-k, then top-p of the rest; None if `best` has too few scores.

    `best`: each row's highest scores in descending order."""
    # Sums are float64, so that sums over a large vocabulary do not lose small terms.
    vocab_size, count = scores.shape[1], best.shape[1]
    is_any_rank, is_any_mass = top_k == vocab_size, top_p == 1.0
    kth = best.gather(1, (top_k.clamp(max=count) - 1).unsqueeze(1))
    kth = kth.masked_fill(is_any_rank.unsqueeze(1), -math.inf)
    total = scores.double().exp_().masked_fill_(scores < kth, 0.0).sum(dim=-1, keepdim=True)
    weights = best.double().exp_()
    before = weights.cumsum(dim=-1) - weights
    num_kept = (before < top_p.unsqueeze(1) * total).sum(dim=-1)
    is_short = torch.where(is_any_rank, ~is_any_mass & (num_kept == count), top_k > count)
    if count < vocab_size and bool(is_short.any()):
        return None
    lightest = best.gather(1, (num_kept.clamp(min=1) - 1).unsqueeze(1))
    return torch.maximum(kth, lightest.masked_fill(is_any_mass.unsqueeze(1), -math.inf))


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def _tensor(values: Any, like: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype, device=like.device)
