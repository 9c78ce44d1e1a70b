"""A layer as the fused kernels read it."""

from dataclasses import dataclass

import torch

from parrot.engine.kernels.attention_shape import HeadNorm
from parrot.engine.models.decoder import DecoderLayer
from parrot.engine.models.fused_weights import DOWN_SLOT, OUT_SLOT, LayerWeight
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.weights import weight_of


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The weights and norms of one layer."""

    qkv: LayerWeight
    out: LayerWeight
    gate_up: LayerWeight
    down: LayerWeight
    attn_norm: RMSNorm
    mlp_norm: RMSNorm
    head_norm: HeadNorm | None
    cos_sin: torch.Tensor  # The table of angles.

    @classmethod
    def of(cls, layer: DecoderLayer, cos_sin: torch.Tensor) -> "FusedLayer":
        attn_norm, mlp_norm = layer.attn_norm, layer.mlp_norm
        assert isinstance(attn_norm, RMSNorm)
        assert isinstance(mlp_norm, RMSNorm)
        return cls(
            qkv=weight_of(layer.qkv),
            out=weight_of(layer.out, slot=OUT_SLOT),
            gate_up=weight_of(layer.mlp.up),
            down=weight_of(layer.mlp.down, slot=DOWN_SLOT),
            attn_norm=attn_norm,
            mlp_norm=mlp_norm,
            head_norm=layer.head_norm,
            cos_sin=cos_sin,
        )
