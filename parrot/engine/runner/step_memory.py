"""The GPU memory that steps take, besides weights and KV."""

import torch

from parrot.engine.config import SchedulerConfig
from parrot.engine.models.spec import DecoderSpec

# Kernels, the workspaces of libraries, and CUDA's own memory for graphs.
_FIXED_BYTES = 1 << 30
GRAPH_TOKENS = 2048  # The most tokens in a graph.
_SLOTS_PER_TOKEN = 5  # Partial results of attention in the largest plans, for each token.


def step_bytes(
    spec: DecoderSpec,
    limits: SchedulerConfig,
    dtype: torch.dtype,
    *,
    unpacks: bool,
    num_converted: int = 0,
) -> int:
    """An estimate of the bytes for steps, from the largest arrays that exist at the same time.

    `unpacks`: steps with many tokens convert matrices to `dtype` first. `num_converted`: the
    codes of the head that a step with the most outputs converts."""
    tokens, hidden = limits.max_num_batched_tokens, spec.hidden_size
    width = max(layer.mlp.width for layer in spec.layers)
    shapes = [layer.attention for layer in spec.layers]
    q = max(shape.num_heads * shape.head_dim for shape in shapes)
    qkv = max((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim for shape in shapes)
    # Gate and up with their product, qkv with q, and states before and after norms.
    of_token = 3 * width + qkv + q + 4 * hidden
    of_step = limits.max_batch_size * spec.vocab_size + (2 * width * hidden if unpacks else 0)
    # The allocator does not join the memory of converted layers for the larger head.
    of_step += num_converted
    # Eager steps, eager steps before captures, and graphs have arrays of their own, since the
    # allocator does not give the memory of one of them to another.
    in_graph = min(tokens, GRAPH_TOKENS)
    numbers = sum(count * of_token + of_step for count in (tokens, in_graph, in_graph))
    partial = 4 * _SLOTS_PER_TOKEN * tokens * q
    return _FIXED_BYTES + numbers * dtype.itemsize + partial
