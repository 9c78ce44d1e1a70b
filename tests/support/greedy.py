"""Checks greedy outputs against transformers without depending on ties."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

_TIE = 2e-3  # Rounding in float32 may change the order of logits with a smaller difference.


class Greedy:
    """A model in transformers, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._twin: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def check(self, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> None:
        """Check that each token of each output has the largest logit at its position."""
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            tokens = torch.tensor([[*prompt, *output]])
            with torch.inference_mode():
                logits = self._twin(tokens[:, :-1]).logits[0, len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            gap = logits.max(dim=1).values - chosen
            wrong = torch.nonzero(gap > _TIE).flatten().tolist()
            assert not wrong, f"output {number}: tokens {wrong} are not the most likely ones"
