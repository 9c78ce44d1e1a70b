"""The GPU memory that steps take, besides weights and KV."""

import torch

from parrot.engine.config import SchedulerConfig
from parrot.engine.models.spec import DecoderSpec

# Kernels, the workspaces of libraries, and CUDA's own memory for graphs.
_FIXED_BYTES = 1 << 30
# Arrays are allocated for eager steps, for eager steps before captures, and for graphs. The
# allocator does not give the memory of one of them to another.
_POOLS = 3
_SLOTS_PER_TOKEN = 5  # Partial results of attention in the largest plans, for each token.


def step_bytes(
    spec: DecoderSpec, limits: SchedulerConfig, dtype: torch.dtype, *, unpacks: bool
) -> int:
    """An estimate of the bytes for steps, from the largest arrays that exist at the same time.

    `unpacks`: steps with many tokens convert matrices to `dtype` first."""
    tokens, hidden = limits.max_num_batched_tokens, spec.hidden_size
    width = max(layer.mlp.width for layer in spec.layers)
    shapes = [layer.attention for layer in spec.layers]
    q = max(shape.num_heads * shape.head_dim for shape in shapes)
    qkv = max((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim for shape in shapes)
    # Gate and up with their product, qkv with q, and states before and after norms.
    numbers = tokens * (3 * width + qkv + q + 4 * hidden)
    numbers += limits.max_batch_size * spec.vocab_size
    if unpacks:
        numbers += 2 * width * hidden
    partial = 4 * _SLOTS_PER_TOKEN * tokens * q
    return _FIXED_BYTES + _POOLS * numbers * dtype.itemsize + partial
