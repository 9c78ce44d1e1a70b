"""Random steps over trees of contexts, with expected outputs in float64.

The tests in the interpreter and those on the device share these cases. The reference does not use
pages, plans or tiles: it has each request's keys and values as one sequence."""

from dataclasses import dataclass, field

import numpy as np
import torch

from parrot.engine.attention.context_tree import GateConfig, IntArray
from parrot.engine.attention.quantised import dequantise, quantise
from parrot.engine.attention.work_list import StepRows
from parrot.engine.kernels.attention_shape import AttentionShape, ScoreRule, plain_rule
from parrot.engine.kernels.launch import KVView

SHARE_ALL = GateConfig(memory_rate=1.0, l2_bytes=0, partial_rate=1.0e30, launch_s=0.0)
"""A gate to which partial results and launches cost nothing."""


@dataclass(frozen=True)
class Request:
    """Nested prefixes as (name, number of tokens), then `own` tokens before the `new` tokens of
    this step."""

    path: tuple[tuple[str, int], ...]
    own: int
    new: int = 1

    @property
    def start(self) -> int:
        return sum(length for _, length in self.path) + self.own


@dataclass
class Case:
    """The tensors of a step, with its KV pool and the expected output. The step adds `k_new` and
    `v_new` [tokens, kv_heads, head_dim] to the pool."""

    step: StepRows
    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    expected: torch.Tensor = field(repr=False)
    rule: ScoreRule
    k_exponents: torch.Tensor | None = None
    v_exponents: torch.Tensor | None = None

    @property
    def kv(self) -> KVView:
        caches = (self.k_cache, self.v_cache, self.tables, self.positions)
        return KVView(*caches, self.k_exponents, self.v_exponents)


PageKey = tuple[object, int]
Sequence = tuple[torch.Tensor, torch.Tensor]


def make_case(
    requests: list[Request],
    shape: AttentionShape,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
    key_scale: float = 1.0,
    quantised: bool = False,
    rule: ScoreRule | None = None,
) -> Case:
    """Place the requests in random pages. All unused slots of the pool are NaN. The inputs are the
    same on each device, and the expected output is computed on `device`.

    A prefix's unaligned tail is copied into each request's own pages, as the engine does.
    `key_scale` multiplies the keys, and so the scores. With `quantised`, the caches have quantised
    KV, and the expected output is computed from the dequantised numbers."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        (k.to(device), v.to(device))
        for k, v in _sequences(requests, shape, generator, dtype, key_scale)
    ]
    if quantised:
        sequences = [
            (dequantise(*quantise(k), dtype), dequantise(*quantise(v), dtype)) for k, v in sequences
        ]
    page_keys = [_page_keys(i, request, shape.page_size) for i, request in enumerate(requests)]
    tables, k_cache, v_cache = _lay_out(sequences, page_keys, shape, generator)
    k_exponents = v_exponents = None
    if quantised:
        (k_cache, k_exponents), (v_cache, v_exponents) = quantise(k_cache), quantise(v_cache)
    starts = np.array([r.start for r in requests], dtype=np.int32)
    q_lens = np.array([r.new for r in requests], dtype=np.int32)
    positions = np.concatenate([np.arange(r.start, r.start + r.new) for r in requests])
    q_size = (len(positions), shape.num_heads, shape.head_dim)
    q = torch.randn(q_size, generator=generator).to(dtype).to(device)
    q_parts = torch.split(q, q_lens.tolist())
    rule = rule or plain_rule(shape.head_dim)
    answers = [_reference(*a, rule) for a in zip(q_parts, sequences, starts.tolist(), strict=True)]
    new = [[part[start:] for part in kv] for kv, start in zip(sequences, starts, strict=True)]
    return Case(
        step=StepRows(tables, starts, q_lens),
        q=q,
        k_new=torch.cat([k for k, _ in new]),
        v_new=torch.cat([v for _, v in new]),
        k_cache=k_cache,
        v_cache=v_cache,
        tables=torch.from_numpy(tables).to(device),
        positions=torch.from_numpy(positions.astype(np.int32)).to(device),
        expected=torch.cat(answers).cpu(),
        rule=rule,
        k_exponents=k_exponents,
        v_exponents=v_exponents,
    )


def poison_outside_of_windows(case: Case, shape: AttentionShape) -> int:
    """Write NaN to all pages outside the windows of the step. Returns their number.

    In a pool of window slots, other contexts may have written to these pages."""
    assert case.rule.window is not None
    size, seen = shape.page_size, set()
    tables, starts, counts = case.step.tables, case.step.starts, case.step.q_lens
    for table, start, count in zip(tables, starts.tolist(), counts.tolist(), strict=True):
        first = max(0, start + 1 - case.rule.window) // size
        seen.update(table[first : (start + count - 1) // size + 1].tolist())
    hidden = [page for page in range(len(case.k_cache)) if page not in seen]
    for pages in (case.k_cache, case.v_cache):
        pages[hidden] = torch.nan if case.k_exponents is None else 0x7F
    return len(hidden)


def _sequences(
    requests: list[Request],
    shape: AttentionShape,
    generator: torch.Generator,
    dtype: torch.dtype,
    key_scale: float,
) -> list[Sequence]:
    """Each request's keys and values [tokens, kv_heads, head_dim]. Prefixes with the same name are
    equal."""

    def draw(length: int) -> Sequence:
        size = (length, shape.num_kv_heads, shape.head_dim)
        k, v = (torch.randn(size, generator=generator) for _ in range(2))
        return (k * key_scale).to(dtype), v.to(dtype)

    prefixes: dict[tuple[tuple[str, int], ...], Sequence] = {}
    sequences = []
    for request in requests:
        parts = []
        for depth in range(1, len(request.path) + 1):
            name = request.path[:depth]
            if name not in prefixes:
                prefixes[name] = draw(name[-1][1])
            parts.append(prefixes[name])
        parts.append(draw(request.own + request.new))
        sequences.append((torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])))
    return sequences


def _page_keys(index: int, request: Request, page: int) -> list[PageKey]:
    """The key of each page of a request: the prefix that fills the page, or the request itself."""
    keys: list[PageKey] = []
    for depth in range(1, len(request.path) + 1):
        name = request.path[:depth]
        shared_pages = sum(length for _, length in name) // page
        keys += [(name, p) for p in range(len(keys), shared_pages)]
    end = -(-(request.start + request.new) // page)
    return keys + [(index, p) for p in range(len(keys), end)]


def _lay_out(
    sequences: list[Sequence],
    page_keys: list[list[PageKey]],
    shape: AttentionShape,
    generator: torch.Generator,
) -> tuple[IntArray, torch.Tensor, torch.Tensor]:
    """Block tables and the two caches. After a row's last page, its table has the id of another
    page."""
    page = shape.page_size
    names = list(dict.fromkeys(key for keys in page_keys for key in keys))
    num_pages = len(names) + 3
    places = torch.randperm(num_pages, generator=generator)[: len(names)].tolist()
    place_of = dict(zip(names, places, strict=True))
    size = (num_pages, shape.num_kv_heads, page, shape.head_dim)
    k_cache, v_cache = (sequences[0][0].new_full(size, float("nan")) for _ in "kv")
    width = max(len(keys) for keys in page_keys) + 2
    tables = np.full((len(sequences), width), places[0], dtype=np.int32)
    for row, (keys, (k, v)) in enumerate(zip(page_keys, sequences, strict=True)):
        for column, key in enumerate(keys):
            place = place_of[key]
            tables[row, column] = place
            part = slice(column * page, min((column + 1) * page, len(k)))
            k_cache[place, :, : part.stop - part.start] = k[part].transpose(0, 1)
            v_cache[place, :, : part.stop - part.start] = v[part].transpose(0, 1)
    return tables, k_cache, v_cache


def _reference(q: torch.Tensor, kv: Sequence, start: int, rule: ScoreRule) -> torch.Tensor:
    """Causal attention of the last len(q) tokens, in float64."""
    group = q.shape[1] // kv[0].shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in kv)
    scores = torch.einsum("thd,shd->hts", q.double(), k) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    last_seen = start + torch.arange(len(q), device=q.device)
    keys = torch.arange(len(k), device=q.device)
    is_hidden = keys > last_seen[:, None]
    if rule.window is not None:
        is_hidden |= keys <= last_seen[:, None] - rule.window
    scores.masked_fill_(is_hidden, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of norms. A NaN anywhere gives NaN, which fails each comparison."""
    difference = actual.double().cpu() - expected
    return float(difference.norm() / expected.norm())


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def rope_reference(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head of x [tokens, heads, dim]."""
    cos, sin = cos_sin[positions.long()].double().unsqueeze(1).chunk(2, dim=-1)
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
