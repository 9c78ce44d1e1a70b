"""Launches the sampling kernels, which choose a token for each row of logits."""

from typing import Protocol

import torch
import triton

from parrot.engine.kernels.sampling_kernels import (
    adjust_logits_kernel,
    best_of_chunks_kernel,
    best_of_rows_kernel,
    find_floors_kernel,
    mask_logits_kernel,
    noisy_best_of_chunks_kernel,
)
from parrot.engine.kernels.sampling_layout import NUM_COLUMNS, NUM_FIELDS, NUM_SETTINGS

_CHUNK = 4096  # Logits that a program of the chunk kernels reads.
_CHUNK_WARPS = 4  # Warps of a program that reads a chunk.
_NOISE_WARPS = 8  # Warps of a program that also computes noise.
_FLOOR_BLOCK = 8192  # Logits that the top-k/top-p search reads at once.
_FLOOR_WARPS = 32  # Warps of a program of the top-k/top-p search.
_ENTRIES = 1024  # Penalty and bias entries that a program processes at once.


class TokenShard(Protocol):
    """The tokens whose logits one rank computes: `count` tokens from `first` on."""

    @property
    def first(self) -> int: ...

    @property
    def count(self) -> int: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, columns] -> [rows, ranks * columns], in the order of ranks."""
        ...


def best_tokens(logits: torch.Tensor, shard: TokenShard | None = None) -> torch.Tensor:
    """int32 [rows]: the first token with the largest logit; -1 if a logit is not finite.

    logits  [rows, vocab], of any float type, rows contiguous
    shard   the tokens of the logits, which may be followed by padding; None for all tokens"""
    rows, width = logits.shape
    assert logits.stride(1) == 1
    found = torch.empty((2, *_chunks(logits)), dtype=torch.int32, device=logits.device)
    first, count = (0, width) if shard is None else (shard.first, shard.count)
    best_of_chunks_kernel[found.shape[1:]](
        logits,
        found[0].view(torch.float32),
        found[1],
        logits.stride(0),
        count,
        first,
        BLOCK=_CHUNK,
        num_warps=_CHUNK_WARPS,
    )
    if shard is not None:
        gathered = shard.all_gather(found.flatten(0, 1))
        found = gathered.view(2, rows, gathered.shape[1])
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    return _best_of_rows(found[0].view(torch.float32), found[1], out)


def adjust_logits(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor, entries: torch.Tensor
) -> None:
    """Apply penalties and biases (sampling_layout.py) in place.

    logits     float32 [rows, vocab], rows contiguous
    token_ids  int32, the step's tokens, including tokens that were pending
    rows       int32 [adjusted rows, NUM_COLUMNS]
    entries    int32 [entries, NUM_FIELDS]"""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert rows.shape[1] == NUM_COLUMNS
    assert entries.shape[1] == NUM_FIELDS
    assert rows.is_contiguous()
    assert entries.is_contiguous()
    adjust_logits_kernel[(len(rows),)](
        logits,
        token_ids,
        rows,
        rows.view(torch.float32),
        entries,
        entries.view(torch.float32),
        logits.stride(0),
        logits.shape[1],
        BLOCK=_ENTRIES,
    )


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Hide all tokens except the allowed ones, in place.

    logits  float32 [rows, vocab], rows contiguous
    rows    int32 [masked rows]: rows of the logits
    words   int32 [masked rows, words]: bit i of word j allows token 32 j + i. Tokens after the last
            word are hidden"""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert len(words) == len(rows)
    assert words.is_contiguous()
    vocab_size = logits.shape[1]
    mask_logits_kernel[(len(rows), triton.cdiv(vocab_size, _CHUNK))](
        logits,
        rows,
        words,
        logits.stride(0),
        words.shape[1],
        vocab_size,
        BLOCK=_CHUNK,
        num_warps=_CHUNK_WARPS,
    )


def draw_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, settings: torch.Tensor, *, limited: bool
) -> torch.Tensor:
    """Replace the greedy `tokens` from `best_tokens` by sampled tokens, in place.

    settings  int32 [rows, NUM_SETTINGS] (sampling_layout.py)
    limited   whether a row has a top-k or a top-p"""
    rows, vocab_size = logits.shape
    assert settings.shape == (rows, NUM_SETTINGS), settings.shape
    assert settings.is_contiguous()
    assert len(tokens) == rows
    assert logits.stride(1) == 1
    as_floats = settings.view(torch.float32)
    floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if limited:
        find_floors_kernel[(rows,)](
            logits,
            tokens,
            settings,
            as_floats,
            floors,
            logits.stride(0),
            vocab_size,
            BLOCK=min(_FLOOR_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=_FLOOR_WARPS,
        )
    scores, chosen = _room(logits)
    noisy_best_of_chunks_kernel[scores.shape](
        logits,
        tokens,
        settings,
        as_floats,
        floors,
        scores,
        chosen,
        logits.stride(0),
        vocab_size,
        LIMITED=limited,
        BLOCK=_CHUNK,
        num_warps=_NOISE_WARPS,
    )
    return _best_of_rows(scores, chosen, tokens)


def _room(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for a score and a token per chunk of each row."""
    size = _chunks(logits)
    scores = torch.empty(size, dtype=torch.float32, device=logits.device)
    return scores, torch.empty(size, dtype=torch.int32, device=logits.device)


def _chunks(logits: torch.Tensor) -> tuple[int, int]:
    return len(logits), triton.cdiv(logits.shape[1], _CHUNK)


def _best_of_rows(scores: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    num_chunks = scores.shape[1]
    assert scores.is_contiguous()
    assert tokens.is_contiguous()
    best_of_rows_kernel[(len(scores),)](
        scores,
        tokens,
        out,
        NUM_CHUNKS=num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return out
