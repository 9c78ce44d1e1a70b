"""The loads of `bench_gpu`, and their floors on an H200."""

import math
import random
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmark.kernels import MEMORY_RATE
from parrot.engine.core.steps import RunnerInfo, SampleSpec, SequenceStep, StepPlan
from parrot.engine.kernels.launch import E4M3_RATE, MATRIX_RATE
from parrot.engine.models.families import spec_from_config
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.models.tensors import OWN, num_matrix_weights, tensor_plans
from parrot.engine.runner.kv_cache import KVLayout
from parrot.protocol.sampling import ResolvedSampling

Row = dict[str, Any]

GREEDY = ResolvedSampling(temperature=0.0)
MODELS = ("qwen3-0.6b", "llama-3.1-8b", "llama-2-7b", "llama-2-13b")
OTHER_MODELS = (
    *("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"),
    *("granite-3.3-8b", "phi-4", "olmo-2-7b"),
)
LONG_MODELS = ("llama-2-7b", "llama-2-13b")  # Cases exceed these models' own context limit.


@dataclass(frozen=True)
class Decode:
    """A decode step of `batch` sequences in `roots` groups. A sequence has `shared` tokens in
    common with its group, and from `own` to `own_max` tokens of its own."""

    name: str
    batch: int
    own: int
    own_max: int | None = None
    shared: int = 0
    roots: int = 1

    def own_lengths(self) -> list[int]:
        rng = random.Random(0)
        return [rng.randint(self.own, self.own_max or self.own) for _ in range(self.batch)]


PLAIN = tuple(Decode(f"decode B={batch} ctx 2k", batch, 2048) for batch in (1, 8, 64))
LONG = tuple(Decode(f"decode B={batch} ctx 8k", batch, 8192) for batch in (1, 8, 64))
# Prompts of 5835 to 7100 tokens whose first 5107 are common, in the middle of their outputs.
COPILOT = tuple(Decode(f"copilot B={batch}", batch, 728, 1632, 5107) for batch in (8, 16, 32, 64))
ROOTS4 = Decode("roots4 B=64", 64, 728, 1632, 5107, 4)
# Agents with the same files in their prompts.
AGENTS = tuple(Decode(f"agents B={batch}", batch, 300, shared=7000) for batch in (9, 16))
CROWD = Decode("25 at 2200", 25, 2200)
# Forks of one long context. A step of 16 forks should take at most 1.15 times as long as of one.
LONG_FORKS = tuple(
    Decode(f"forks B={batch} ctx 94k", batch, 64, shared=94_208) for batch in (1, 16)
)
DECODES = {
    "qwen3-0.6b": PLAIN,
    "llama-3.1-8b": (*PLAIN, *LONG),
    "llama-2-7b": (*PLAIN, *COPILOT, ROOTS4),
    "llama-2-13b": (*PLAIN[:2], CROWD, *AGENTS),
    **dict.fromkeys(OTHER_MODELS, PLAIN),
    "gemma-3-27b": (*PLAIN[:2], *LONG_FORKS),
}
# (tokens, tokens in one step)
PREFILLS = {
    "qwen3-0.6b": ((2048, 2048), (8192, 8192)),
    "llama-3.1-8b": ((2048, 2048), (8192, 8192), (8192, 4096), (8192, 2048)),
    "llama-2-7b": ((2048, 2048),),
    "llama-2-13b": ((2048, 2048), (8192, 8192)),
    **dict.fromkeys(OTHER_MODELS, ((2048, 2048),)),
}
MIXED = (256, 512, 1024, 2048, 4096)
"""Prompt tokens in a step next to the decodes of `CROWD`."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model in bfloat16, or with its layers' matrices in another type."""

    weight_bytes: int
    token_bytes: int  # KV of a token in the layers without windows.
    window_bytes: int  # KV of a token in the layers with windows.
    window: int  # 0: no layer has a window.
    layer_weights: int
    q_widths: tuple[int, int]  # Sums over the layers without and with windows.
    matrix_rate: float  # FLOP/s of the products with weights.

    @classmethod
    def of(cls, model: str, *, quantised: bool = False, matrix_bytes: float = 2.0) -> "Shape":
        """`matrix_bytes`: bytes per number in the layers' matrices; 1 for e4m3."""
        spec = spec_from_config(KNOWN_SHAPES[model], model)
        sizes = {name: math.prod(plan.shape) for name, plan in tensor_plans(spec).items()}
        embed = sizes[f"{OWN.embed}.weight"]
        head = 0 if spec.tie_embeddings else embed
        matrices = int(num_matrix_weights(spec) * (2 - matrix_bytes))
        kv = KVLayout.of(spec, 1, torch.bfloat16, quantised=quantised, with_slots=True)
        layers = [layer.attention for layer in spec.layers]
        full, inside = (
            sum(x.num_heads * x.head_dim for x in layers if (x.window is not None) is windowed)
            for windowed in (False, True)
        )
        return cls(
            weight_bytes=2 * (sum(sizes.values()) - head) - matrices,
            token_bytes=kv.block_bytes,
            window_bytes=kv.slot_bytes,
            window=spec.window or 0,
            layer_weights=sum(sizes.values()) - embed - head,
            q_widths=(full, inside),
            matrix_rate=E4M3_RATE if matrix_bytes == 1.0 else MATRIX_RATE,
        )

    def decode_floor_ms(self, case: Decode) -> float:
        own = case.own_lengths()
        tokens = sum(own) + case.shared * case.roots
        shared = max(0, min(case.shared, self.window - min(own))) * case.roots
        inside = sum(min(length, self.window) for length in own) + shared
        kv_bytes = tokens * self.token_bytes + inside * self.window_bytes
        return (self.weight_bytes + kv_bytes) / MEMORY_RATE * 1e3

    def prefill_floor_ms(self, tokens: int) -> float:
        inside = min(self.window, tokens)
        pairs = (tokens**2 / 2, inside * tokens - inside**2 / 2)  # Of queries and keys.
        attention = sum(4 * width * num for width, num in zip(self.q_widths, pairs, strict=True))
        products = 2 * self.layer_weights * tokens / self.matrix_rate
        return (products + attention / MATRIX_RATE) * 1e3


def spread_ms(times: Sequence[float]) -> Row:
    return {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}


class Sequences:
    """The contexts of a case and their consecutive steps. Blocks are in random order at the
    beginning of the pool, as in the engine."""

    def __init__(self, case: Decode, info: RunnerInfo, steps: int = 128) -> None:
        self._size = block_size = info.block_size
        rng = random.Random(1)
        full = case.shared // block_size
        own = [-(-(case.shared + n + steps) // block_size) - full for n in case.own_lengths()]
        needed = min(info.num_blocks, case.roots * full + sum(own) + 8192 // block_size)
        free = iter(rng.sample(range(needed), needed))
        roots = [[next(free) for _ in range(full)] for _ in range(case.roots)]
        self._ends = [case.shared + own for own in case.own_lengths()]
        self._tables = []
        for i, count in enumerate(own):
            self._tables.append(roots[i % case.roots] + [next(free) for _ in range(count)])
        self._free = free
        self._changes = self._slots(info)

    def _slots(self, info: RunnerInfo) -> tuple[tuple[int, int], ...]:
        """Slots for the blocks of all windows, in turn. A case must not need more slots than the
        pool has."""
        if info.window is None:
            return ()
        first = [max(0, end - info.window.num_tokens) // self._size for end in self._ends]
        blocks = dict.fromkeys(
            block for at, table in zip(first, self._tables, strict=True) for block in table[at:]
        )
        return tuple((block, i % info.window.num_slots) for i, block in enumerate(blocks))

    @staticmethod
    def slots_of(blocks: Sequence[int], info: RunnerInfo) -> tuple[tuple[int, int], ...]:
        """Slots for all blocks of a prompt."""
        window = info.window
        return (
            () if window is None else tuple((b, i % window.num_slots) for i, b in enumerate(blocks))
        )

    def next_plan(self, *beside: SequenceStep) -> StepPlan:
        changes, self._changes = self._changes, ()
        return StepPlan((*self.next_step(), *beside), slot_changes=changes)

    def next_step(self) -> tuple[SequenceStep, ...]:
        sequences = []
        for i, table in enumerate(self._tables):
            end = self._ends[i]
            blocks = table[: end // self._size + 1]
            sequences.append(SequenceStep(i, [7], end, blocks, SampleSpec(i, GREEDY, 0, 0)))
            self._ends[i] += 1
        return tuple(sequences)

    def fill(self, num_tokens: int, chunk: int) -> list[SequenceStep]:
        """The steps that compute one more context."""
        blocks = [next(self._free) for _ in range(-(-num_tokens // self._size))]
        rng = random.Random(2)
        tokens = array("i", [rng.randrange(10_000) for _ in range(num_tokens)])
        spec = SampleSpec(0, GREEDY, 0, 0)
        return [
            SequenceStep(
                10_000,
                tokens[first : first + chunk],
                first,
                blocks[: (first + chunk) // self._size],
                spec if first + chunk == num_tokens else None,
            )
            for first in range(0, num_tokens, chunk)
        ]
