"""Which decoders have all products between two attentions as one kernel (`linear.chain`)."""

from collections.abc import Sequence

import torch

from parrot.engine.kernels.linear.chain import (
    ChainLayer,
    ChainWeight,
    Following,
    Heads,
    Norm,
    RowChain,
    fits_tiles,
)
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
    found = [chain_layer(layer, follower, norm) for layer, follower in pairs]
    if len({kind for layer in found for kind in layer.kinds}) > 1:
        return None
    chain = RowChain(found, heads)
    return chain if chain.fits else None


def _is_supported(layer: FusedLayer) -> bool:
    weights = (layer.out, layer.gate_up, layer.down, layer.qkv)
    has_bias = any(weight.bias is not None for weight in weights[:3])
    return layer.head_norm is None and not has_bias and all(map(_is_whole, weights))


def _is_whole(weight: LayerWeight) -> bool:
    """Whether the chain can multiply a weight. No other GPU may have a part of it."""
    found = None if weight.ranks is not None else weight.for_chain()
    return found is not None and fits_tiles(found)


def chain_layer(layer: FusedLayer, follower: FusedLayer | None, norm: RMSNorm) -> ChainLayer:
    """`norm`: after the last layer, which has no follower."""
    next_norm, following = norm, None
    if follower is not None:
        next_norm = follower.attn_norm
        following = Following(_of(follower.qkv), follower.qkv.bias, follower.cos_sin)
    return ChainLayer(
        _of(layer.out),
        _of(layer.gate_up),
        _of(layer.down),
        Norm(layer.mlp_norm.weight, layer.mlp_norm.eps),
        Norm(next_norm.weight, next_norm.eps),
        following,
    )


def _of(weight: LayerWeight) -> ChainWeight:
    found = weight.for_chain()
    assert found is not None
    return found
