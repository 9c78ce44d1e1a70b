"""A decoder's layers on a CPU: torch's operators, and compiled kernels where these fit."""

from concurrent.futures import Future
from functools import partial

import torch

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.attention.prompt_attention import PromptAttention
from parrot.engine.attention.quantised import PooledKV
from parrot.engine.attention.torch_attention import TorchAttention
from parrot.engine.attention.work_list import StepRows, WorkList
from parrot.engine.kernels.cpu.native import Kernels
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.few_rows import MAX_ROWS, FewRowsDecoder, fits
from parrot.engine.models.many_rows import ManyRowsDecoder

# Tokens of KV that sequences share beyond the first that reads them. With more, torch's products of
# many rows with them are faster than kernels that read them for each sequence: measured, as fast
# for 16 forks behind 2,048 tokens, 1.4 times behind 8,000.
_MUCH_SHARED = 1 << 15


class CpuDecoder:
    """Runs a `Decoder` over the KV of `pool`. `kernels`: for what lies between the products, of the
    model's type, from when they are there on; a model that they do not fit runs without."""

    def __init__(
        self,
        model: Decoder,
        pool: PooledKV,
        attention: TorchAttention,
        kernels: "Future[Kernels] | None",
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._kernels = kernels
        self._few_rows: FewRowsDecoder | None = None
        self._many_rows: ManyRowsDecoder | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: IntArray,
        step: StepRows,
        work: WorkList,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the last layer's output for `rows`, or for all."""
        self._take_kernels()
        few_rows = self._few_rows if len(token_ids) <= MAX_ROWS else None
        if few_rows is not None and work.num_shared_tokens <= _MUCH_SHARED:
            hidden = few_rows.forward(token_ids, step)
            return hidden if rows is None else hidden.index_select(0, rows)
        attend = partial(self._attention.run, plan=self._attention.plan(work, step))
        model = self._many_rows or self._model
        at = torch.from_numpy(positions).long().to(self._model.device)
        return model.forward(token_ids, at, attend, rows)

    def _take_kernels(self) -> None:
        """Use the kernels from now on, if they are there now."""
        if self._kernels is None or not self._kernels.done():
            return
        if self._kernels.exception() is None:
            kernels = self._kernels.result()
            self._attention.prompts = PromptAttention(kernels)
            if fits(self._model, self._pool):
                self._few_rows = FewRowsDecoder(self._model, self._pool, kernels)
                self._many_rows = ManyRowsDecoder(self._model, kernels)
        self._kernels = None
