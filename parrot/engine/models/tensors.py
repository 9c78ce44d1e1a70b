"""The tensors of a decoder, and where a checkpoint has them.

All decoders use the names of Llama's tensors. `TensorNames` has the names of a checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod

from parrot.engine.models.spec import DecoderSpec, LayerSpec, TensorNames

OWN = TensorNames()  # The decoder's own names.

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor of a decoder, and its name in a checkpoint."""

    source: str
    shape: Shape


def tensor_plans(spec: DecoderSpec) -> dict[str, TensorPlan]:
    """The plans of all tensors, by the decoder's names."""
    return dict(_plans(spec))


def num_weights(spec: DecoderSpec) -> int:
    return sum(prod(plan.shape) for plan in tensor_plans(spec).values())


def num_layer_weights(spec: DecoderSpec) -> int:
    """The weights of a layer, on average."""
    layers = (shapes for layer in spec.layers for shapes in _layer_shapes(spec, layer).values())
    return sum(map(prod, layers)) // spec.num_layers


def source_shapes(plans: Mapping[str, TensorPlan]) -> dict[str, Shape]:
    """The shapes of all tensors that a checkpoint must have, by the checkpoint's names."""
    return {plan.source: plan.shape for plan in plans.values()}


def _plans(spec: DecoderSpec) -> Iterator[tuple[str, TensorPlan]]:
    modules = {getattr(OWN, x.name): getattr(spec.names, x.name) for x in fields(OWN)}
    for name, shape in _top_shapes(spec).items():
        module, _, parameter = name.rpartition(".")
        yield name, TensorPlan(f"{modules[module]}.{parameter}", shape)
    for i, layer in enumerate(spec.layers):
        own, source = OWN.layer.format(i=i), spec.names.layer.format(i=i)
        for name, shape in _layer_shapes(spec, layer).items():
            module, _, parameter = name.rpartition(".")
            plan = TensorPlan(f"{source}.{modules[module]}.{parameter}", shape)
            yield f"{own}.{name}", plan


def _top_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    hidden, width = spec.hidden_size, spec.embed_dim or spec.hidden_size
    shapes = _module(OWN.embed, spec.vocab_size, width)
    if not spec.tie_embeddings:
        shapes |= _module(OWN.lm_head, spec.vocab_size, width)
    if spec.final_norm:
        shapes |= _module(OWN.final_norm, hidden, bias=spec.norm.bias)
    if spec.position_offset is not None:
        shapes |= _module(OWN.positions, spec.max_positions + spec.position_offset, hidden)
    if spec.embed_dim is not None:
        shapes |= _module(OWN.project_in, hidden, width)
        shapes |= _module(OWN.project_out, width, hidden)
    return shapes


def _layer_shapes(spec: DecoderSpec, layer: LayerSpec) -> dict[str, Shape]:
    """The shapes of a layer's tensors, by their names in the layer."""
    attention, mlp, hidden = layer.attention, layer.mlp, spec.hidden_size
    q_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    shapes = (
        _module(OWN.q, q_width, hidden, bias=attention.qkv_bias)
        | _module(OWN.k, kv_width, hidden, bias=attention.qkv_bias)
        | _module(OWN.v, kv_width, hidden, bias=attention.qkv_bias)
        | _module(OWN.o, hidden, q_width, bias=attention.o_bias)
        | _module(OWN.up, mlp.width, hidden, bias=mlp.bias)
        | _module(OWN.down, hidden, mlp.width, bias=mlp.bias)
        | _module(OWN.attn_norm, hidden, bias=spec.norm.bias)
        | _module(OWN.mlp_norm, hidden, bias=spec.norm.bias)
    )
    if mlp.gated:
        shapes |= _module(OWN.gate, mlp.width, hidden, bias=mlp.bias)
    if attention.qk_norm:
        shapes |= _module(OWN.q_norm, attention.head_dim)
        shapes |= _module(OWN.k_norm, attention.head_dim)
    return shapes


def _module(name: str, *weight: int, bias: bool = False) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": weight}
    return shapes | {f"{name}.bias": weight[:1]} if bias else shapes
