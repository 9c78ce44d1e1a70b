"""Inputs for the samplers of the CPU and of the kernels."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from parrot.engine.core.steps import SampleSpec
from parrot.engine.kernels.noise import noise_keys
from parrot.engine.kernels.sampling import adjust_logits
from parrot.engine.kernels.sampling_layout import KEY_0, KEY_1
from parrot.engine.runner.inputs import (
    AdjustedRow,
    AdjustedTokens,
    Adjustments,
    adjustments_of,
    draw_settings,
)
from parrot.protocol.sampling import ResolvedSampling

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.5},
    {"temperature": 30.0},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.6},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
]

PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.3},
    {"presence_penalty": -1.1, "frequency_penalty": -0.2},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "presence_penalty": 0.5},
    {"logit_bias": {0: 3.5, 11: -100.0, 2**30: 1.0}},
    {"frequency_penalty": 1.7, "repetition_penalty": 1.1, "logit_bias": {3: 0.4, 5: -0.7}},
]


def specs_of(configs: Sequence[ResolvedSampling], first: int = 0) -> list[SampleSpec]:
    return [SampleSpec(i, c, 2**40 + i, 3 * i + 1) for i, c in enumerate(configs, first)]


def settings_of(specs: Sequence[SampleSpec], device: str = "cpu") -> torch.Tensor:
    rows = np.stack([draw_settings(spec.sampling) for spec in specs])
    keys = noise_keys([s.seed for s in specs], [s.position for s in specs])
    rows[:, KEY_0 : KEY_1 + 1] = keys
    return torch.from_numpy(rows).to(device)


def penalized(vocab_size: int, length: int, seed: int = 0) -> list[SampleSpec]:
    """Samples with all kinds of penalties. Contexts have up to `length` tokens. The last tokens are
    output, and the newest token may or may not have occurred before."""
    rng = random.Random(seed)
    specs = []
    for job_id, fields in enumerate(PENALTIES * 3):
        used = max(1, vocab_size // rng.choice([1, 2, 50]))
        context = [rng.randrange(used) for _ in range(rng.randint(length // 2, length))]
        context.append(rng.choice([context[-1], rng.randrange(vocab_size)]))
        output = context[-rng.randint(1, length) :]
        config = ResolvedSampling.model_validate(fields)
        specs.append(SampleSpec(job_id, config, 0, len(context), output, context))
    return specs


def without_newest(specs: Sequence[SampleSpec]) -> list[SampleSpec]:
    """The samples while their newest token is pending."""
    return [s._replace(output_ids=s.output_ids[:-1], context_ids=s.context_ids[:-1]) for s in specs]


def adjustments_for(specs: Sequence[SampleSpec], *, pending: bool) -> Adjustments:
    """Adjustments in which row i is for `specs[i]`. If `pending`, the newest token of row i is
    token i of the step."""
    rows = [
        AdjustedRow(i, i if pending else -1, AdjustedTokens(s.job_id, s.sampling), s)
        for i, s in enumerate(specs)
    ]
    return adjustments_of(rows)


def adjusted(
    logits: torch.Tensor, step: Adjustments, tokens: Sequence[int], device: str = "cpu"
) -> torch.Tensor:
    """Logits as the kernel adjusts them. Checks that the kernel does not write past the end of the
    rows."""
    rows, vocab_size = logits.shape
    wide = torch.full((rows, vocab_size + 5), 9.0, device=device)
    wide[:, :vocab_size] = logits
    parts = (torch.from_numpy(part).to(device) for part in (step.rows, step.entries))
    ids = torch.tensor(tokens, dtype=torch.int32, device=device)
    adjust_logits(wide[:, :vocab_size], ids, *parts)
    assert bool((wide[:, vocab_size:] == 9.0).all())
    return wide[:, :vocab_size].cpu()


def adjusted_exactly(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Penalties and biases by definition, in float64."""
    exact = logits.double().clone()
    for row, spec in zip(exact, specs, strict=True):
        config = spec.sampling
        if config.repetition_penalty:
            for token in set(spec.context_ids):
                by = config.repetition_penalty
                row[token] *= by if row[token] < 0 else 1 / by
        for token, count in Counter(spec.output_ids).items():
            row[token] -= config.presence_penalty + config.frequency_penalty * count
        for token, bias in (config.logit_bias or {}).items():
            if token < len(row):
                row[token] += bias
    return exact


def random_mask(rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random mask as words of 32 bits, and the same mask as bool [rows, vocab]. Tokens after the
    last whole word are not allowed."""
    generator = torch.Generator().manual_seed(rows)
    num_words = vocab_size // 32
    words = torch.randint(-(2**31), 2**31, (rows, num_words), generator=generator)
    bits = (words[:, :, None] >> torch.arange(32)) & 1
    allowed = torch.zeros(rows, vocab_size, dtype=torch.bool)
    allowed[:, : 32 * num_words] = bits.flatten(1).bool()
    return words.int(), allowed
