"""The tensors of a decoder, and where a checkpoint has them.

All decoders use the names of Llama's tensors. `TensorNames` has the names of a checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod

import torch

from parrot.engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    RopeSpec,
    TensorNames,
)

OWN = TensorNames()  # The decoder's own names.
OUTPUT_SCALE = "layer_scalar"  # A layer's tensor that belongs to no module.
_FIELDS = {getattr(OWN, x.name): x.name for x in fields(OWN)}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor of a decoder, and where a checkpoint has it: in rows of a tensor `source`."""

    source: str
    source_shape: Shape
    shape: Shape
    first: int = 0  # The first row.
    order_dim: int = 0  # The dimension that `order` applies to.
    # Rows from one head to the next, if the source has the rows of q, k and v by head; else 0.
    head_step: int = 0
    transposed: bool = False  # The source is [inputs, outputs].
    # The dimensions of a head in the order of the decoder, -1 for padding; (): as in the source.
    order: tuple[int, ...] = ()
    source_head: int = 0  # The number of dimensions of a head in the source, with `order`.

    @property
    def is_contiguous(self) -> bool:
        """Whether the tensor is consecutive rows of the source."""
        return not self.head_step and not self.transposed

    @property
    def is_unchanged(self) -> bool:
        """Whether the tensor is consecutive rows of the source, in the source's order."""
        return self.is_contiguous and not self.order

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """The tensor, before `ordered`."""
        rows = source.t() if self.transposed else source
        count = self.in_source(self.shape[0], 0)
        if not self.head_step:
            return rows[self.first : self.first + count]
        heads = rows.reshape(-1, self.head_step, *rows.shape[1:])
        size = count // len(heads)
        return heads[:, self.first : self.first + size].flatten(0, 1)

    def in_source(self, count: int, dim: int) -> int:
        """The entries of dimension `dim` before `ordered` that become the first `count`."""
        is_ordered = self.order and dim == self.order_dim
        return count // len(self.order) * self.source_head if is_ordered else count

    def ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or some of its heads, with the dimensions of each head in order."""
        if not self.order:
            return tensor
        dim, size = self.order_dim, self.source_head
        heads = tensor.reshape(*tensor.shape[:dim], -1, size, *tensor.shape[dim + 1 :])
        zeros = torch.zeros_like(heads.narrow(dim + 1, 0, 1))
        order = torch.tensor(self.order, device=tensor.device) % (size + 1)
        padded = torch.cat((heads, zeros), dim + 1)
        return padded.index_select(dim + 1, order).flatten(dim, dim + 1)


def tensor_plans(spec: DecoderSpec) -> dict[str, TensorPlan]:
    """The plans of all tensors, by the decoder's names."""
    return dict(_plans(spec))


def num_weights(spec: DecoderSpec) -> int:
    return sum(prod(plan.shape) for plan in tensor_plans(spec).values())


def num_matrix_weights(spec: DecoderSpec) -> int:
    """The weights of the matrices of all layers."""
    plans = tensor_plans(spec)
    return sum(prod(plans[name].shape) for name in plans if is_matrix(name))


def head_name(spec: DecoderSpec) -> str:
    """The decoder's name of the matrix that computes logits, which may be the embedding."""
    return f"{OWN.embed if spec.tie_embeddings else OWN.lm_head}.weight"


def head_shape(spec: DecoderSpec) -> tuple[int, int]:
    """The shape of the embedding and of the matrix that computes logits."""
    return spec.vocab_size, spec.embed_dim or spec.hidden_size


def is_matrix(name: str) -> bool:
    """Whether a tensor, by the decoder's name, is a matrix of a layer."""
    module, _, parameter = name.rpartition(".")
    return parameter == "weight" and module.endswith(tuple(f".{x}" for x in _MATRICES))


def products_of(names: Iterable[str]) -> list[list[str]]:
    """The matrices of layers among tensors, by the decoder's names. Those of one product are one
    list."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in filter(is_matrix, names):
        module = name.removesuffix(".weight")
        own = next(x for x in _MATRICES if module.endswith(f".{x}"))
        joined = next((x for x in _JOINED if own in x), (own,))
        found.setdefault((module.removesuffix(own), joined), []).append(name)
    return list(found.values())


def num_layer_weights(spec: DecoderSpec) -> int:
    """The weights of a layer, on average."""
    layers = (shapes for layer in spec.layers for shapes in _layer_shapes(spec, layer).values())
    return sum(map(prod, layers)) // spec.num_layers


def source_shapes(plans: Mapping[str, TensorPlan]) -> dict[str, Shape]:
    """The shapes of all tensors that a checkpoint must have, by the checkpoint's names."""
    return {plan.source: plan.source_shape for plan in plans.values()}


_JOINED = ((OWN.q, OWN.k, OWN.v), (OWN.gate, OWN.up))  # Modules that may be one in a checkpoint.
_MATRICES = (*_JOINED[0], *_JOINED[1], OWN.o, OWN.down)
_ROTATED = (OWN.q, OWN.k, OWN.q_norm, OWN.k_norm)


def _plans(spec: DecoderSpec) -> Iterator[tuple[str, TensorPlan]]:
    for name, shape in _top_shapes(spec).items():
        module, _, parameter = name.rpartition(".")
        yield name, TensorPlan(f"{_source(spec.names, module)}.{parameter}", shape, shape)
    for i, layer in enumerate(spec.layers):
        unpadded = replace(layer, attention=layer.attention.unpadded())
        sources = _layer_shapes(spec, unpadded)
        for name, shape in _layer_shapes(spec, layer).items():
            yield f"{OWN.layer.format(i=i)}.{name}", _layer_plan(spec, i, name, shape, sources)


def _source(names: TensorNames, module: str) -> str:
    """The name of a module in the checkpoint."""
    return str(getattr(names, _FIELDS[module]))


def _layer_plan(
    spec: DecoderSpec, index: int, name: str, shape: Shape, sources: dict[str, Shape]
) -> TensorPlan:
    """`sources`: the shapes of the layer's tensors without padding."""
    names, attention = spec.names, spec.layers[index].attention
    module, _, parameter = name.rpartition(".")
    if not module:
        return TensorPlan(f"{names.layer.format(i=index)}.{name}", shape, shape)
    if module == OWN.v and attention.v_is_k:
        k = _layer_plan(spec, index, f"{OWN.k}.{parameter}", shape, sources)
        return replace(k, order=())
    joined = _joined(names, module)
    sizes = [sources[f"{other}.{parameter}"][0] for other in joined]
    place, head_dim = joined.index(module), attention.unpadded().head_dim
    plan = TensorPlan(
        source=f"{names.layer.format(i=index)}.{_source(names, module)}.{parameter}",
        source_shape=(sum(sizes), *sources[name][1:]),
        shape=shape,
        first=sum(sizes[:place]),
        source_head=head_dim,
    )
    if len(joined) > 1 and names.joins_heads:
        plan = replace(plan, first=place * head_dim, head_step=len(joined) * head_dim)
    if names.transposed and module in _MATRICES and parameter == "weight":
        plan = replace(plan, source_shape=plan.source_shape[::-1], transposed=True)
    if module in _ROTATED:
        rope = None if attention.rope is None else spec.ropes[attention.rope]
        dim = 0 if module in _JOINED[0] else len(shape) - 1
        return replace(plan, order=_head_order(rope, head_dim, attention.head_dim), order_dim=dim)
    if module == OWN.v or name == f"{OWN.o}.weight":
        order = _head_order(None, head_dim, attention.head_dim)
        return replace(plan, order=order, order_dim=0 if module == OWN.v else 1)
    return plan


def _joined(names: TensorNames, module: str) -> list[str]:
    """The modules whose rows are in one tensor of the checkpoint."""
    for group in _JOINED:
        if module in group:
            return [other for other in group if _source(names, other) == _source(names, module)]
    return [module]


def _head_order(rope: RopeSpec | None, size: int, head_dim: int) -> tuple[int, ...]:
    """The `size` dimensions of a head in an order in which dimension i rotates with
    i + head_dim / 2.

    Dimensions that do not rotate are last in each half. () is the order of the checkpoint."""
    # q k^T does not change if the dimensions of q and k change places. So all kernels support all
    # kinds of rotations.
    num_rotated = size if rope is None else rope.rotated(size)
    if size == head_dim and num_rotated == size and not (rope and rope.interleaved):
        return ()
    rotated, rest = range(num_rotated), [*range(num_rotated, size)]
    firsts, seconds = rotated[: num_rotated // 2], rotated[num_rotated // 2 :]
    if rope is not None and rope.interleaved:
        firsts, seconds = rotated[::2], rotated[1::2]
    free = head_dim // 2 - num_rotated // 2  # Places for `rest` and padding in each half.
    rest += [-1] * (2 * free - len(rest))
    return (*firsts, *rest[:free], *seconds, *rest[free:])


def _top_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    hidden, (_, width) = spec.hidden_size, head_shape(spec)
    shapes = _module(OWN.embed, *head_shape(spec))
    if not spec.tie_embeddings:
        shapes |= _module(OWN.lm_head, *head_shape(spec))
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
        | _norm_shapes(spec, layer)
    )
    if mlp.gated:
        shapes |= _module(OWN.gate, mlp.width, hidden, bias=mlp.bias)
    if layer.has_output_scale:
        shapes[OUTPUT_SCALE] = (1,)
    return shapes


def _norm_shapes(spec: DecoderSpec, layer: LayerSpec) -> dict[str, Shape]:
    norms, attention = layer.norms, layer.attention
    has = {
        OWN.attn_norm: norms.attn,
        OWN.attn_out_norm: norms.attn_out,
        OWN.mlp_norm: norms.mlp,
        OWN.mlp_out_norm: norms.mlp_out,
    }
    shapes: dict[str, Shape] = {}
    for name in (name for name, exists in has.items() if exists):
        shapes |= _module(name, spec.hidden_size, bias=spec.norm.bias)
    if attention.qk_norm:
        shapes |= _module(OWN.q_norm, *_head_gains(attention, attention.num_heads))
        shapes |= _module(OWN.k_norm, *_head_gains(attention, attention.num_kv_heads))
    return shapes


def _head_gains(attention: AttentionSpec, num_heads: int) -> Shape:
    size = attention.head_dim
    return {"head": (size,), "heads": (num_heads, size), "width": (num_heads * size,)}[
        attention.qk_norm
    ]


def _module(name: str, *weight: int, bias: bool = False) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": weight}
    return shapes | {f"{name}.bias": weight[:1]} if bias else shapes
