"""Which decoders have all products between two attentions as one kernel (`kernels.linear.chain`).

Only models in e4m3 import it."""

from collections.abc import Sequence

import torch

from parrot.engine.kernels.linear.chain import (
    ChainLayer,
    CodedWeight,
    Following,
    Heads,
    Norm,
    RowChain,
    fits_tiles,
)
from parrot.engine.kernels.linear.products import is_blocked
from parrot.engine.models.fp8_weights import Fp8Weight
from parrot.engine.models.fused_layer import FusedLayer
from parrot.engine.models.fused_weights import LayerWeight
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.spec import AttentionSpec


def chain_of(
    layers: Sequence[FusedLayer], norm: RMSNorm, attention: AttentionSpec
) -> RowChain | None:
    """The chain of layers, or None if it does not support them. `norm`: after the last layer."""
    heads = Heads(attention.num_heads, attention.num_kv_heads, attention.head_dim)
    if norm.weight.dtype != torch.bfloat16 or not heads.fit_tiles:
        return None
    if not all(map(_is_supported, layers)):
        return None
    pairs = zip(layers, (*layers[1:], None), strict=True)
    chain = RowChain([chain_layer(layer, follower, norm) for layer, follower in pairs], heads)
    return chain if chain.fits else None


def _is_supported(layer: FusedLayer) -> bool:
    weights = (layer.out, layer.gate_up, layer.down, layer.qkv)
    has_bias = any(weight.bias is not None for weight in weights[:3])
    return layer.head_norm is None and not has_bias and all(map(_is_coded, weights))


def _is_coded(weight: LayerWeight) -> bool:
    """Whether a weight is whole, in e4m3, and has a scale for each output."""
    if not isinstance(weight, Fp8Weight) or weight.ranks is not None:
        return False
    return not is_blocked(weight.scales) and fits_tiles(weight.weight)


def chain_layer(layer: FusedLayer, follower: FusedLayer | None, norm: RMSNorm) -> ChainLayer:
    """`norm`: after the last layer, which has no follower."""
    next_norm, following = norm, None
    if follower is not None:
        next_norm = follower.attn_norm
        following = Following(_coded(follower.qkv), follower.qkv.bias, follower.cos_sin)
    return ChainLayer(
        _coded(layer.out),
        _coded(layer.gate_up),
        _coded(layer.down),
        Norm(layer.mlp_norm.weight, layer.mlp_norm.eps),
        Norm(next_norm.weight, next_norm.eps),
        following,
    )


def _coded(weight: LayerWeight) -> CodedWeight:
    assert isinstance(weight, Fp8Weight)
    return CodedWeight(weight.weight, weight.scales)
