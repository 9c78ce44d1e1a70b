"""One decoder for all architectures. A `DecoderSpec` selects its parts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from parrot.engine.kernels.attention_shape import HeadNorm
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.fp8 import Fp8Linear
from parrot.engine.models.layers import (
    ACTIVATIONS,
    MLP,
    FourBitLinear,
    LayerNorm,
    Linear,
    Norm,
    RMSNorm,
    Rope,
    make_linear,
    rotate_,
)
from parrot.engine.models.packed import Packed, packed_linear
from parrot.engine.models.parallel import Ranks, SummedLinear, VocabularyShard
from parrot.engine.models.spec import AttentionSpec, DecoderSpec, LayerSpec, is_default
from parrot.engine.models.tensors import OUTPUT_SCALE, OWN, head_name, num_weights
from parrot.engine.models.words_linear import WordsLinear, words_of

Angles = tuple[torch.Tensor, torch.Tensor]

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Writes a step's new KV of a layer to the pool and computes attention over the contexts: layer,
q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim] -> [rows, heads * head_dim].

It must not change q, k and v. The next call may overwrite its result."""

# A tensor of the checkpoint by name, in the model's dtype and on its device.
TakeTensor = Callable[[str], torch.Tensor]
# A matrix of a layer, or the head (`head_name`), by name in a packed format; None if it is
# multiplied in the model's dtype.
TakePacked = Callable[[str], Packed | None]


@dataclass(frozen=True, slots=True)
class QKNorm:
    """A norm of each head of q and k, without biases; `weight` [heads + kv_heads, head_dim]."""

    weight: torch.Tensor
    eps: float
    centred: bool = False  # LayerNorm, otherwise RMSNorm.

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        norm = F.layer_norm if self.centred else F.rms_norm
        return norm(heads, heads.shape[-1:], None, eps=self.eps).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class WidthNorm:
    """RMSNorm of all heads of q together, and of all heads of k."""

    num_heads: int
    q: RMSNorm
    k: RMSNorm

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        q, k = heads[:, : self.num_heads].flatten(1), heads[:, self.num_heads :].flatten(1)
        return torch.cat((self.q(q), self.k(k)), dim=1).view_as(heads)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The parts of one layer, and its forward pass."""

    index: int
    spec: LayerSpec
    qkv: Linear
    out: Linear
    mlp: MLP
    attn_norm: Norm | None
    attn_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    qk_norm: QKNorm | WidthNorm | None
    is_plain: bool  # The norms and sums are those of Llama.
    eps: float  # Of the norm of v.
    output_scale: torch.Tensor | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        linears = self.qkv, self.out, self.mlp.up, self.mlp.down
        return tuple(x.linear if isinstance(x, SummedLinear) else x for x in linears)

    @property
    def head_norm(self) -> HeadNorm | None:
        """`qk_norm` as one weight for all heads of q and one for all heads of k."""
        norm = self.qk_norm
        if norm is None:
            return None
        assert isinstance(norm, QKNorm)
        return HeadNorm(norm.weight[0], norm.weight[self.spec.attention.num_heads], norm.eps)

    def __call__(
        self,
        x: torch.Tensor,
        angles: Sequence[Angles],
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden], or only the rows `rows`.

        `angles`: of each of the decoder's ropes."""
        if not self.is_plain:
            return self._other(x, angles, attend, rows)
        assert self.attn_norm is not None
        assert self.mlp_norm is not None
        attended = self._attended(self.attn_norm(x), angles, attend)
        if rows is not None:
            attended, x = attended.index_select(0, rows), x.index_select(0, rows)
        x = self.out(attended, x)
        return self.mlp(self.mlp_norm(x), x)

    def _other(
        self,
        x: torch.Tensor,
        angles: Sequence[Angles],
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `__call__`."""
        after_sum = self.spec.norms.after_sum
        normed = x if after_sum else _normed(self.attn_norm, x)
        attended = self._attended(normed, angles, attend)
        if rows is not None:
            attended, x = attended.index_select(0, rows), x.index_select(0, rows)
        if self.spec.parallel:
            shared = normed if rows is None else normed.index_select(0, rows)
            hidden = shared if self.mlp_norm is None else self.mlp_norm(x)
            x = self._sum(self.out, self.attn_out_norm, attended, x)
            return self._sum(self.mlp, self.mlp_out_norm, hidden, x)
        x = self._sum(self.out, self.attn_out_norm, attended, x)
        if after_sum:
            x = _normed(self.attn_norm, x)
            return _normed(self.mlp_norm, self.mlp(x, x))
        x = self._sum(self.mlp, self.mlp_out_norm, _normed(self.mlp_norm, x), x)
        return x if self.output_scale is None else x.mul_(self.output_scale)

    def _sum(
        self, part: Linear, norm: Norm | None, inputs: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """residual + the scaled norm of `part(inputs)`."""
        scale = self.spec.residual_scale
        if norm is None and scale == 1.0:
            return part(inputs, residual)
        return torch.add(residual, _normed(norm, part(inputs)), alpha=scale)

    def _attended(self, x: torch.Tensor, angles: Sequence[Angles], attend: Attend) -> torch.Tensor:
        spec = self.spec.attention
        num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        rotated, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated)
        if spec.rope is not None:
            rotate_(rotated, *angles[spec.rope])
        if spec.v_norm:
            v = F.rms_norm(v, v.shape[-1:], eps=self.eps)
        q, k = rotated[:, :num_heads], rotated[:, num_heads:]
        return attend(self.index, q, k, v)


def _normed(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class Decoder:
    """Computes hidden states and logits from tokens and positions. Stateless."""

    def __init__(
        self,
        spec: DecoderSpec,
        take: TakeTensor,
        dtype: torch.dtype,
        device: torch.device,
        map_layers: Callable[[Callable[[int], DecoderLayer], range], Iterable[DecoderLayer]] = map,
        take_packed: TakePacked = lambda name: None,
        ranks: Ranks | None = None,
    ) -> None:
        """`map_layers` may build the layers in parallel.

        With `ranks`, `spec` has the heads and the inner width of one rank, and the functions that
        take tensors return this rank's parts."""
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        self.vocabulary = None if ranks is None else VocabularyShard(spec, ranks)
        self.embed = self._of_vocabulary(take(f"{OWN.embed}.weight"))
        # Rounding the head takes memory that the layers use afterwards.
        self.lm_head = self._build_head(take, take_packed)
        self._embed_scale: torch.Tensor | None = None
        if spec.embed_scale != 1.0:
            self._embed_scale = torch.tensor(spec.embed_scale, dtype=dtype, device=device)
        self._positions = None
        if spec.position_offset is not None:
            self._positions = take(f"{OWN.positions}.weight")[spec.position_offset :]
        self._project_in = self._project_out = None
        if spec.embed_dim is not None:
            self._project_in = make_linear(take(f"{OWN.project_in}.weight"), None)
            self._project_out = make_linear(take(f"{OWN.project_out}.weight"), None)
        sizes = {x.attention.rope: x.attention.head_dim for x in spec.layers}
        self._ropes = [Rope(rope, sizes[i], device) for i, rope in enumerate(spec.ropes)]
        self.layers = list(
            map_layers(
                lambda i: _build_layer(spec, take, take_packed, ranks, i), range(spec.num_layers)
            )
        )
        self.norm = _build_norm(spec, take, OWN.final_norm) if spec.final_norm else None

    def _build_head(self, take: TakeTensor, take_packed: TakePacked) -> Linear:
        name = head_name(self.spec)
        packed = take_packed(name)
        if isinstance(packed, CodedMatrix):
            words = words_of(packed.map(self._of_vocabulary))
            if words is not None:
                return WordsLinear(words, None)
        is_tied = self.spec.tie_embeddings
        return make_linear(self.embed if is_tied else self._of_vocabulary(take(name)), None)

    def _of_vocabulary(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.vocabulary is None else self.vocabulary.padded(rows)

    @property
    def num_head_codes(self) -> int:
        """Codes of this rank's head; 0 for a head in the decoder's type."""
        if not isinstance(self.lm_head, WordsLinear):
            return 0
        return self.lm_head.matrix.outputs * self.lm_head.matrix.inputs

    def num_converted(self, rows: int) -> int:
        """Codes of the head that a step converts to the decoder's type for `rows` outputs."""
        head = self.lm_head
        converts = isinstance(head, WordsLinear) and rows > head.matrix.most_rows
        return self.num_head_codes if converts else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        # A tied embedding counts twice if a copy exists that is packed or in codes. Weights that
        # also exist with four bits count twice as well.
        count = num_weights(replace(self.spec, vocab_size=len(self.embed)))
        has_copy = bool(self.num_head_codes) or self.device.type == "cpu"
        if self.spec.tie_embeddings and has_copy:
            count += self.embed.numel()
        linears = [self.lm_head, *(x for layer in self.layers for x in layer.linears)]
        item_size = self.dtype.itemsize
        extra = sum(x.num_bytes for x in linears if isinstance(x, FourBitLinear))
        for fp8 in (x.matrix for x in linears if isinstance(x, Fp8Linear)):
            extra += fp8.num_bytes - fp8.codes.numel() * item_size
        for words in (x.matrix for x in linears if isinstance(x, WordsLinear)):
            extra += words.num_bytes - words.outputs * words.inputs * item_size
        return count * item_size + extra

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids and positions [rows] -> the last layer's output [rows, hidden].

        With `rows`, only the output of these rows. For other rows the last layer computes only KV.
        """
        x = self.embedded(token_ids)
        if self._project_in is not None:
            x = self._project_in(x)
        if self._positions is not None:
            x = x.add_(F.embedding(positions, self._positions))
        angles = [rope.angles(positions, self.dtype) for rope in self._ropes]
        for layer in self.layers[:-1]:
            x = layer(x, angles, attend)
        return self.layers[-1](x, angles, attend, rows)

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.vocabulary is not None:
            rows = self.vocabulary.embed(token_ids, self.embed)
        else:
            rows = F.embedding(token_ids, self.embed)
        # The factor is rounded to the type of the weights, as in the original models.
        return rows if self._embed_scale is None else rows.mul_(self._embed_scale)

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] from `forward` -> the model's final states [rows, width]."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self._project_out is None else self._project_out(hidden)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """states [rows, width] from `final` -> logits float32 [rows, vocab]."""
        logits = self.own_logits(states)
        return (logits if self.vocabulary is None else self.vocabulary.gather(logits)).float()

    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        """`head`, for the tokens of this rank and in the model's dtype."""
        return self.scaled(self.lm_head(states))

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """The scale and the cap of logits, in place."""
        cap = self.spec.logit_softcap
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] from `forward` -> int32 [rows]: see `VocabularyShard.best`.

        Only for decoders with several ranks."""
        assert self.vocabulary is not None
        return self.vocabulary.best(self.own_logits(self.final(hidden)).float())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] from `forward` -> float32 [rows, vocab]."""
        return self.head(self.final(hidden))


def _build_layer(
    spec: DecoderSpec,
    take: TakeTensor,
    take_packed: TakePacked,
    ranks: Ranks | None,
    index: int,
) -> DecoderLayer:
    layer = spec.layers[index]
    attention, mlp = layer.attention, layer.mlp
    adds_bias = ranks is None or ranks.rank == 0  # A sum over ranks must contain the bias once.
    prefix = OWN.layer.format(i=index)

    def linear(*parts: str, bias: bool) -> Linear:
        weights = [f"{prefix}.{part}.weight" for part in parts]
        biases = torch.cat([take(f"{prefix}.{part}.bias") for part in parts]) if bias else None
        found = [matrix for name in weights if (matrix := take_packed(name)) is not None]
        if len(found) == len(weights) and (packed := packed_linear(found, biases)) is not None:
            return packed
        return make_linear(torch.cat([take(name) for name in weights]), biases)

    def summed(name: str, *, bias: bool) -> Linear:
        own = linear(name, bias=bias and adds_bias)
        return own if ranks is None else SummedLinear(own, ranks)

    ups = (OWN.gate, OWN.up) if mlp.gated else (OWN.up,)
    up, down = linear(*ups, bias=mlp.bias), summed(OWN.down, bias=mlp.bias)

    def norm(name: str, *, exists: bool) -> Norm | None:
        return _build_norm(spec, take, f"{prefix}.{name}") if exists else None

    norms = layer.norms
    return DecoderLayer(
        index=index,
        spec=layer,
        qkv=linear(OWN.q, OWN.k, OWN.v, bias=attention.qkv_bias),
        out=summed(OWN.o, bias=attention.o_bias),
        mlp=MLP(up, down, ACTIVATIONS[mlp.activation], gated=mlp.gated),
        attn_norm=norm(OWN.attn_norm, exists=norms.attn),
        attn_out_norm=norm(OWN.attn_out_norm, exists=norms.attn_out),
        mlp_norm=norm(OWN.mlp_norm, exists=norms.mlp),
        mlp_out_norm=norm(OWN.mlp_out_norm, exists=norms.mlp_out),
        qk_norm=_build_qk_norm(spec, attention, take, prefix),
        is_plain=is_default(layer, except_for=("attention", "mlp")),
        eps=spec.norm.eps,
        output_scale=take(f"{prefix}.{OUTPUT_SCALE}") if layer.has_output_scale else None,
    )


def _build_norm(spec: DecoderSpec, take: TakeTensor, name: str) -> Norm:
    weight = _gains(spec, take, name)
    if spec.norm.kind == "layer":
        bias = take(f"{name}.bias") if spec.norm.bias else None
        return LayerNorm(weight, bias, spec.norm.eps)
    return RMSNorm(weight, spec.norm.eps)


def _gains(spec: DecoderSpec, take: TakeTensor, name: str) -> torch.Tensor:
    weight, offset = take(f"{name}.weight"), spec.norm.gain_offset
    # In bfloat16 the sum would lose most bits of the gain.
    return weight.float() + offset if offset else weight


def _build_qk_norm(
    spec: DecoderSpec, attention: AttentionSpec, take: TakeTensor, prefix: str
) -> QKNorm | WidthNorm | None:
    if not attention.qk_norm:
        return None
    q, k = (_gains(spec, take, f"{prefix}.{name}") for name in (OWN.q_norm, OWN.k_norm))
    eps = spec.norm.eps
    if attention.qk_norm == "width":
        return WidthNorm(attention.num_heads, RMSNorm(q, eps), RMSNorm(k, eps))
    gains = q.expand(attention.num_heads, -1), k.expand(attention.num_kv_heads, -1)
    return QKNorm(torch.cat(gains), eps, spec.norm.kind == "layer")
