"""The kernels that choose a token for each row of logits. `sampling` launches them.

One kernel finds the best token of each chunk, and another the best of a row's chunks. Noise and
scores are the same as in `parrot.engine.kernels.noise` and `parrot.engine.runner.sampling`."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from parrot.engine.kernels import sampling_layout as layout
from parrot.engine.kernels.e4m3 import INFINITY_BITS, bits_of
from parrot.engine.kernels.noise import LARGEST_BELOW_ONE, MIX_1, MIX_2

_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_LARGEST_BELOW_ONE = tl.constexpr(LARGEST_BELOW_ONE)
_INFINITY = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-3.0e38)
# The logit of a hidden token. It is lower than all logits and remains finite at all temperatures.
_HIDDEN = tl.constexpr(-1.0e30)

_KEY_0 = tl.constexpr(layout.KEY_0)
_KEY_1 = tl.constexpr(layout.KEY_1)
_INVERSE_TEMPERATURE = tl.constexpr(layout.INVERSE_TEMPERATURE)
_FLOOR = tl.constexpr(layout.FLOOR)
_TOP_K = tl.constexpr(layout.TOP_K)
_TOP_P = tl.constexpr(layout.TOP_P)
_SETTINGS = tl.constexpr(layout.NUM_SETTINGS)

_ROW = tl.constexpr(layout.ROW)
_PENDING_AT = tl.constexpr(layout.PENDING_AT)
_FIRST = tl.constexpr(layout.FIRST)
_END = tl.constexpr(layout.END)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_REPETITION = tl.constexpr(layout.REPETITION)
_COLUMNS = tl.constexpr(layout.NUM_COLUMNS)
_TOKEN = tl.constexpr(layout.TOKEN)
_COUNT = tl.constexpr(layout.COUNT)
_BIAS = tl.constexpr(layout.BIAS)
_FIELDS = tl.constexpr(layout.NUM_FIELDS)


@triton.jit
def adjust_logits_kernel(
    logits, token_ids, rows, rows_f, entries, entries_f, stride, vocab_size, BLOCK: tl.constexpr
):
    """Program (adjusted row): change the logits of the entries' tokens in place.

    The count of the row's pending token is one higher. If the token has no entry, it is processed
    as one more entry. So its logit gets exactly the operations of the next step's entries."""
    own, own_f = rows + tl.program_id(0) * _COLUMNS, rows_f + tl.program_id(0) * _COLUMNS
    base = logits + tl.load(own + _ROW).to(tl.int64) * stride
    presence, frequency = tl.load(own_f + _PRESENCE), tl.load(own_f + _FREQUENCY)
    repetition = tl.load(own_f + _REPETITION)
    pending_at = tl.load(own + _PENDING_AT)
    pending = tl.load(token_ids + pending_at, mask=pending_at >= 0, other=-1)
    end = tl.load(own + _END)
    num_missing = (pending >= 0).to(tl.int32)
    for first in tl.range(tl.load(own + _FIRST), end + 1, BLOCK):
        index = first + tl.arange(0, BLOCK)
        is_entry = index < end
        at = index * _FIELDS
        token = tl.load(entries + at + _TOKEN, mask=is_entry, other=-1)
        count = tl.load(entries + at + _COUNT, mask=is_entry, other=-1)
        bias = tl.load(entries_f + at + _BIAS, mask=is_entry, other=0.0)
        is_pending = is_entry & (token == pending)
        num_missing -= tl.sum(is_pending.to(tl.int32), 0)
        is_added = index == tl.where(num_missing > 0, end, -1)
        token = tl.where(is_added, pending, token)
        count = tl.where(is_pending | is_added, tl.maximum(count, 0) + 1, count)
        is_inside = (is_entry | is_added) & (token < vocab_size)
        logit = tl.load(base + token, mask=is_inside, other=0.0)
        repeated = tl.where(logit < 0, logit * repetition, tl.div_rn(logit, repetition))
        logit = tl.where(count >= 0, repeated, logit)
        penalty = tl.where(count > 0, presence + frequency * count.to(tl.float32), 0.0)
        tl.store(base + token, logit - penalty + bias, mask=is_inside)


@triton.jit
def mask_logits_kernel(logits, rows, words, stride, num_words, vocab_size, BLOCK: tl.constexpr):
    """Program (masked row, chunk): set the logits of tokens without a bit to `_HIDDEN` in place.

    Logits that are not finite remain, so that later kernels report them."""
    masked = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(
        words + masked * num_words + token // 32, mask=inside & (token < num_words * 32), other=0
    )
    base = logits + tl.load(rows + masked).to(tl.int64) * stride
    logit = tl.load(base + token, mask=inside, other=0.0)
    is_hidden = inside & ((word >> (token % 32)) & 1 == 0) & (tl.abs(logit) < _INFINITY)
    tl.store(base + token, _HIDDEN, mask=is_hidden)


@triton.jit
def best_of_chunks_kernel(
    logits, scores, tokens, stride, vocab_size, first_token, BLOCK: tl.constexpr
):
    """Program (row, chunk): the largest logit and its token, or -1 if a logit is not finite.

    The first column is token `first_token`."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    logit = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
    is_finite = tl.max(bits_of(logit), 0) < INFINITY_BITS
    logit = tl.where(inside, logit, -_INFINITY)
    best = tl.max(logit, 0)
    # Two reductions of numbers are faster than one of pairs (`tl.argmax`).
    first_best = tl.min(tl.where(logit == best, token, vocab_size), 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(scores + at, best)
    tl.store(tokens + at, tl.where(is_finite, first_token + first_best, -1))


@triton.jit
def best_of_rows_kernel(scores, tokens, out, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): the best token of the row's chunks, or -1 if a chunk has -1."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < NUM_CHUNKS
    at = row * NUM_CHUNKS + chunk
    score = tl.load(scores + at, mask=inside, other=-_INFINITY)
    token = tl.load(tokens + at, mask=inside, other=0)
    is_best = chunk == tl.argmax(score, 0)
    best = tl.sum(tl.where(is_best, token, 0), 0)
    tl.store(out + row, tl.where(tl.min(token, 0) < 0, -1, best))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) * _MIX_2
    return x ^ (x >> 15)


@triton.jit
def _gumbel(token, key_0, key_1):
    bits = _mix(_mix(token.to(tl.uint32) ^ key_0.to(tl.uint32)) + key_1.to(tl.uint32))
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    uniform = tl.minimum(uniform, _LARGEST_BELOW_ONE)
    # For a small u, 1 - u would round to 1. A series keeps the precision of log(1 - u).
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * 0.25)))
    exponential = tl.where(uniform < 2.0**-8, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def noisy_best_of_chunks_kernel(
    logits,
    best_tokens,
    settings,
    settings_f,
    floors,
    scores,
    tokens,
    stride,
    vocab_size,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, chunk): the largest sum of score and noise of the scores at or above the floor.

    Greedy rows and rows that are not finite keep their token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + chunk
    own, own_f = settings + row * _SETTINGS, settings_f + row * _SETTINGS
    best = tl.load(best_tokens + row)
    scale = tl.load(own_f + _INVERSE_TEMPERATURE)
    if best < 0 or scale == 0.0:
        tl.store(scores + at, 0.0)
        tl.store(tokens + at, best)
        return
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    base = logits + row * stride
    largest = tl.load(base + best).to(tl.float32)
    logit = tl.load(base + token, mask=inside, other=0.0).to(tl.float32)
    score = (logit - largest) * scale
    floor = tl.load(own_f + _FLOOR)
    if LIMITED:
        floor = tl.maximum(floor, tl.load(floors + row))
    noisy = score + _gumbel(token, tl.load(own + _KEY_0), tl.load(own + _KEY_1))
    noisy = tl.where(inside & (score >= floor), noisy, -_INFINITY)
    tl.store(scores + at, tl.max(noisy, 0))
    tl.store(tokens + at, chunk * BLOCK + tl.argmax(noisy, 0))


@triton.jit
def _scores(base, first, largest, scale, vocab_size, BLOCK: tl.constexpr):
    token = first + tl.arange(0, BLOCK)
    logit = tl.load(base + token, mask=token < vocab_size, other=-_INFINITY).to(tl.float32)
    return (logit - largest) * scale


@triton.jit
def _look(base, largest, scale, vocab_size, low, pivot, BLOCK: tl.constexpr):
    """Return the number, the total weight and the lowest of the scores above `pivot`, and the
    highest score in [low, pivot], or minus infinity if there is none."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    weight = tl.zeros([BLOCK], dtype=tl.float32)
    least = tl.full([BLOCK], _INFINITY, dtype=tl.float32)
    next_lower = tl.full([BLOCK], -_INFINITY, dtype=tl.float32)
    for first in tl.range(0, vocab_size, BLOCK):
        score = _scores(base, first, largest, scale, vocab_size, BLOCK)
        is_above = score > pivot
        count += is_above.to(tl.int32)
        weight += tl.where(is_above, tl.exp(score), 0.0)
        least = tl.minimum(least, tl.where(is_above, score, _INFINITY))
        is_next = (score >= low) & (score <= pivot)
        next_lower = tl.maximum(next_lower, tl.where(is_next, score, -_INFINITY))
    return tl.sum(count, 0), tl.sum(weight, 0), tl.min(least, 0), tl.max(next_lower, 0)


@triton.jit
def _least_kept(base, largest, scale, vocab_size, low, top_k, max_weight, BLOCK: tl.constexpr):
    """The lowest score that has fewer than `top_k` scores above it, with a total weight of less
    than `max_weight`. `low` must not exceed it."""
    high = low * 0.0  # The largest score is 0.
    while low < high:
        pivot = low + (high - low) * 0.5
        pivot = tl.where(pivot < high, pivot, low)
        count, weight, least, next_lower = _look(
            base, largest, scale, vocab_size, low, pivot, BLOCK
        )
        is_kept = (count < top_k) & (weight < max_weight)
        is_empty = next_lower < low  # No score is in [low, pivot].
        high = tl.where(is_kept, tl.where(is_empty, least, next_lower), high)
        low = tl.where(is_kept & ~is_empty, low, least)
    return high


@triton.jit
def find_floors_kernel(
    logits, best_tokens, settings, settings_f, floors, stride, vocab_size, BLOCK: tl.constexpr
):
    """Program (row): the lowest score that top-k, and then top-p, keep."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(best_tokens + row)
    scale = tl.load(settings_f + row * _SETTINGS + _INVERSE_TEMPERATURE)
    top_k = tl.load(settings + row * _SETTINGS + _TOP_K)
    top_p = tl.load(settings_f + row * _SETTINGS + _TOP_P)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if best < 0 or scale == 0.0 or not (has_top_k or top_p < 1.0):
        tl.store(floors + row, -_INFINITY)
        return
    base = logits + row * stride
    largest = tl.load(base + best).to(tl.float32)
    _, total, low, _ = _look(base, largest, scale, vocab_size, _LOWEST, _LOWEST, BLOCK)
    low = tl.maximum(low, _LOWEST)
    if has_top_k:
        low = _least_kept(base, largest, scale, vocab_size, low, top_k, _INFINITY, BLOCK)
    if top_p < 1.0:
        if has_top_k:
            weight = tl.zeros([BLOCK], dtype=tl.float32)
            for first in tl.range(0, vocab_size, BLOCK):
                score = _scores(base, first, largest, scale, vocab_size, BLOCK)
                weight += tl.where(score >= low, tl.exp(score), 0.0)
            total = tl.sum(weight, 0)
        low = _least_kept(
            base, largest, scale, vocab_size, low, vocab_size + 1, total * top_p, BLOCK
        )
    tl.store(floors + row, low)
