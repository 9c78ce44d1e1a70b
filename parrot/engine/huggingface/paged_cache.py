"""Block tables behind transformers' cache interface.

A model asks its cache, layer by layer, to add the new keys and values and to give back all there
are. Here they are added to a pool of slots, and what comes back is gathered from it. Sequences of
one forward pass have equally many new tokens and are padded on the left:

    row 0    _ _ _ x x x n          _  the zero slot, hidden by the attention mask
    row 1    x x x x x x n          x  computed before      n  new
"""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicLayer


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the tokens of one forward pass lie in the pools: int64 [rows, columns], the last
    `num_new` columns being the new tokens."""

    table: torch.Tensor
    num_new: int

    @property
    def num_past(self) -> int:
        return int(self.table.shape[1]) - self.num_new


class PagedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer as [slots, heads, dim], made when the first ones show their
    shape. The last slot is always zero."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._num_slots = num_slots
        self.slots: Slots | None = None
        self.pools: tuple[torch.Tensor, ...] = ()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [rows, heads, new tokens, dim]; returns them with the past before them."""
        slots = self.slots
        assert slots is not None, "a forward pass without slots"
        states = (key_states, value_states)
        if not self.pools:
            self.pools = tuple(self._make_pool(state) for state in states)
        new = slots.table[:, slots.num_past :]
        for pool, state in zip(self.pools, states, strict=True):
            pool[new] = state.transpose(1, 2)
        keys, values = (pool[slots.table].transpose(1, 2) for pool in self.pools)
        return keys, values

    def _make_pool(self, state: torch.Tensor) -> torch.Tensor:
        """Not filled: slots are written before they are read, and memory is not taken early."""
        pool = state.new_empty((self._num_slots + 1, state.shape[1], state.shape[3]))
        pool[-1] = 0
        return pool

    def get_seq_length(self) -> int:
        return 0 if self.slots is None else self.slots.num_past


class PagedCache(Cache):  # type: ignore[misc]
    """One pool per layer of a model."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.zero_slot = num_slots
        super().__init__(layers=[PagedLayer(num_slots) for _ in range(num_layers)])

    def place(self, slots: Slots) -> None:
        """The next forward pass computes these tokens."""
        for layer in self.layers:
            layer.slots = slots

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Slots to slots, in every layer."""
        for layer in self.layers:
            for pool in layer.pools:
                pool[target] = pool[source]

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for layer in self.layers for pool in layer.pools)
