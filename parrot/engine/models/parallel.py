"""Tensor parallelism: each rank has a shard of every large matrix.

    split by outputs    q, k, v, gate, up     each rank has some heads, and some of the inner width
    split by inputs     o, down               the ranks' products are summed
    split by tokens     embedding, head       rows are summed, logits are concatenated

A KV head that several ranks need is replicated. Norms, positions and hidden states are replicated
on all ranks. A layer has two all-reduces, and a step has one more for its embeddings. The ranks
gather the largest logits of each rank, or all logits if a request needs them."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.layers import Linear
from parrot.engine.models.spec import AttentionSpec, DecoderSpec, LayerSpec
from parrot.engine.models.tensors import OWN
from parrot.utils.config import ConfigError

if TYPE_CHECKING:
    from parrot.engine.kernels.ranks.exchanges import Exchanges


class Ranks(Protocol):
    """The collectives of one rank. All ranks must make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def exchanges(self) -> "Exchanges | None":
        """None if the ranks cannot access each other's memory."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over all ranks, in place, and return x."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with rank 0's x."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, columns] -> [rows, size * columns], contiguous, in the order of ranks."""
        ...


_LAYERS = OWN.layer.removesuffix("{i}")


@dataclass(frozen=True, slots=True)
class Part:
    """Entries [start, stop) of a tensor's dimension `dim`, which has `size` entries."""

    dim: int
    start: int
    stop: int
    size: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy of the part, which does not keep the whole tensor's memory alive."""
        own = whole.narrow(self.dim, self.start, self.stop - self.start)
        return own.clone(memory_format=torch.contiguous_format)

    def of_codes(self, whole: CodedMatrix) -> CodedMatrix | None:
        """The part of a matrix; None if the part splits a group."""
        if self.dim == 0:
            return whole.map(self.of)
        size = whole.group
        if self.start % size or self.stop % size:
            return None
        groups = Part(1, self.start // size, self.stop // size, self.size // size)
        return CodedMatrix(self.of(whole.codes), groups.of(whole.scales), groups.of(whole.least))


@dataclass(frozen=True)
class Partition:
    """One rank's part of a decoder."""

    spec: DecoderSpec  # The spec of the whole decoder.
    ranks: Ranks

    @cached_property
    def local_spec(self) -> DecoderSpec:
        """The spec with the heads and the inner width of one rank."""
        return self.spec.with_layers(lambda _, layer: self._local_layer(layer))

    def _local_layer(self, layer: LayerSpec) -> LayerSpec:
        attention, mlp, size = layer.attention, layer.mlp, self.ranks.size
        num_kv_heads = max(1, attention.num_kv_heads // size)
        return replace(
            layer,
            attention=replace(
                attention, num_heads=attention.num_heads // size, num_kv_heads=num_kv_heads
            ),
            mlp=replace(mlp, width=mlp.width // size),
        )

    def part(self, name: str) -> Part | None:
        """This rank's part of a tensor, by the decoder's name; None for the whole tensor."""
        module, _, kind = name.rpartition(".")
        if module in (OWN.embed, OWN.lm_head):
            return self._vocabulary_part()
        if not module.startswith(_LAYERS):
            return None
        index, _, own = module.removeprefix(_LAYERS).partition(".")
        layer = self.spec.layers[int(index)]
        attention, width = layer.attention, layer.mlp.width
        q_width = attention.num_heads * attention.head_dim
        if own == OWN.q:
            return self._even(0, q_width)
        if own in (OWN.k, OWN.v):
            return self._kv_part(attention, attention.head_dim)
        if own == OWN.q_norm and attention.qk_norm == "heads":
            return self._even(0, attention.num_heads)
        if own == OWN.k_norm and attention.qk_norm == "heads":
            return self._kv_part(attention, 1)
        if own in (OWN.gate, OWN.up):
            return self._even(0, width)
        if own in (OWN.o, OWN.down) and kind == "weight":
            return self._even(1, q_width if own == OWN.o else width)
        return None

    def _even(self, dim: int, size: int) -> Part:
        share = size // self.ranks.size
        return Part(dim, self.ranks.rank * share, (self.ranks.rank + 1) * share, size)

    def _kv_part(self, whole: AttentionSpec, rows: int) -> Part:
        """The KV heads of this rank's query heads; `rows` of the tensor for each head."""
        size = self.ranks.size
        num_heads = max(1, whole.num_kv_heads // size)
        first = self.ranks.rank * whole.num_kv_heads // size
        return Part(0, first * rows, (first + num_heads) * rows, whole.num_kv_heads * rows)

    def _vocabulary_part(self) -> Part:
        size, share = self.spec.vocab_size, tokens_of_rank(self.spec, self.ranks.size)
        first = min(self.ranks.rank * share, size)
        return Part(0, first, min(first + share, size), size)


def tokens_of_rank(spec: DecoderSpec, num_ranks: int) -> int:
    """The rows of the embedding and of the head on each rank, with padding."""
    return -(-spec.vocab_size // num_ranks)


def require_divisible(spec: DecoderSpec, size: int, source: str) -> None:
    """Raise `ConfigError` if a decoder cannot be divided evenly among `size` ranks.

    The error names the possible sizes."""
    if any(layer.attention.qk_norm == "width" for layer in spec.layers):
        raise ConfigError(
            f"`instance.tensor_parallel`: {source} normalises all its heads together, which "
            "ranks cannot divide among them; set it to 1"
        )
    if _can_divide(spec, size):
        return
    heads = spec.attention
    fitting = [n for n in range(1, min(heads.num_heads, 64) + 1) if _can_divide(spec, n)]
    widths = " or ".join(map(str, sorted(spec.mlp_widths)))
    raise ConfigError(
        f"`instance.tensor_parallel`: {source} has {heads.num_heads} heads, {heads.num_kv_heads} "
        f"KV heads and an inner width of {widths}, which {size} ranks cannot divide among them; "
        f"set it to {', '.join(map(str, fitting))}"
    )


def _can_divide(spec: DecoderSpec, size: int) -> bool:
    divides_heads = all(
        x.attention.num_heads % size == 0
        and (x.attention.num_kv_heads % size == 0 or size % x.attention.num_kv_heads == 0)
        for x in spec.layers
    )
    return divides_heads and all(width % size == 0 for width in spec.mlp_widths)


class SummedLinear:
    """A product whose inputs are split among ranks. `linear` is this rank's part of it."""

    def __init__(self, linear: Linear, ranks: Ranks) -> None:
        self.linear = linear
        self.ranks = ranks

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = self.ranks.all_reduce(self.linear(x))
        return out if residual is None else out.add_(residual)


class VocabularyShard:
    """The tokens whose embeddings and logits this rank has: `count` tokens from `first` on.

    All ranks have equal numbers of rows, so the last ranks may have padding at the end."""

    def __init__(self, spec: DecoderSpec, ranks: Ranks) -> None:
        self.ranks = ranks
        self._vocab_size = spec.vocab_size
        self._share = tokens_of_rank(spec, ranks.size)
        self.first = ranks.rank * self._share
        self.count = max(0, min(self._share, spec.vocab_size - self.first))

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad this rank's rows of the embedding or the head to the number of rows per rank."""
        return F.pad(rows, (0, 0, 0, self._share - len(rows)))

    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """token_ids [tokens] -> [tokens, width]."""
        return self.ranks.all_reduce(self.embed_own(token_ids, rows))

    def embed_own(
        self, token_ids: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's addend of the embeddings: 0 for tokens of other ranks."""
        own = token_ids - self.first
        is_other = (own < 0) | (own >= self._share)
        found = torch.index_select(rows, 0, own.masked_fill(is_other, 0), out=out)
        return found.masked_fill_(is_other.unsqueeze(1), 0)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits [rows, share] -> all logits [rows, vocab], rows contiguous."""
        return self.all_gather(logits)[:, : self._vocab_size]

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits float32 [rows, share] -> int32 [rows]: the first token with the
        largest logit of all ranks; -1 if a logit is not finite."""
        own = F.pad(logits[:, : self.count], (0, self._share - self.count), value=-math.inf)
        largest, places = own.max(dim=-1)
        finite = logits[:, : self.count].sum(dim=-1).isfinite()
        tokens = torch.where(finite, self.first + places, -1).int()
        pairs = torch.stack((largest.view(torch.int32), tokens), dim=1)
        gathered = self.all_gather(pairs).view(len(logits), self.ranks.size, 2)
        scores, candidates = gathered.view(torch.float32)[:, :, 0], gathered[:, :, 1]
        found = candidates.gather(1, scores.argmax(dim=1, keepdim=True))
        return torch.where((candidates < 0).any(dim=1), -1, found[:, 0])

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.all_gather(x)
