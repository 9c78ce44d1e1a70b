"""A small replacement of the engine core: assigns blocks to contexts and builds the plans of
steps."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parrot.engine.core.steps import (
    BlockCopy,
    PoolSpec,
    SampleSpec,
    ScoreSpec,
    SequenceStep,
    StepPlan,
    StepResult,
    StepRunner,
)
from parrot.protocol.sampling import ResolvedSampling

GREEDY = ResolvedSampling(temperature=0)


@dataclass
class Context:
    """A context's `tokens`. The KV of the first `done` tokens is in `blocks`, and the last
    `num_output` tokens were generated."""

    context_id: int
    tokens: list[int]
    done: int = 0
    num_output: int = 0
    blocks: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def wanted(self) -> int:
        return len(self.tokens) - self.done


class Driver:
    """Assigns blocks in random order, so that no test depends on adjacent blocks."""

    def __init__(self, runner: StepRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = list(range(runner.info.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._next_id = 0

    def context(self, tokens: Sequence[int]) -> Context:
        self._next_id += 1
        return Context(self._next_id, list(tokens))

    def fork(self, parent: Context, length: int) -> Context:
        """Share the full blocks of the parent's first `length` tokens, and copy the rest."""
        size = self.runner.info.block_size
        full, rest = divmod(length, size)
        child = self.context(parent.tokens[:length])
        child.done, child.blocks = length, parent.blocks[:full]
        if rest:
            child.blocks.append(self._free.pop())
            child.copies.append(BlockCopy(parent.blocks[full], child.blocks[-1], rest))
        return child

    def release(self, context: Context) -> None:
        """Free the blocks and keep the tokens, like a preemption. The blocks must not be shared."""
        self._free += context.blocks
        context.blocks, context.done = [], 0

    def step(
        self,
        work: Sequence[tuple[Context, int]],
        sampling: ResolvedSampling = GREEDY,
        read: Mapping[int, PoolSpec | ScoreSpec] | None = None,
    ) -> StepResult:
        """Compute the next `count` tokens of each context. A context samples if no prompt token is
        left. `read` tells, for each context id, how to read the hidden states of these tokens."""
        sequences, copies = [], []
        for context, count in work:
            end = context.done + count
            while len(context.blocks) * self.runner.info.block_size < end:
                context.blocks.append(self._free.pop())
            copies += context.copies
            context.copies.clear()
            sample = None
            if end == len(context.tokens):
                output = tuple(context.tokens[end - context.num_output :])
                text = tuple(context.tokens)
                sample = SampleSpec(context.context_id, sampling, 0, end, output, text)
            tokens = context.tokens[context.done : end]
            spec = (read or {}).get(context.context_id)
            sequences.append(
                SequenceStep(context.context_id, tokens, context.done, context.blocks, sample, spec)
            )
            context.done = end
        return self.runner.run(StepPlan(tuple(sequences), tuple(copies)))

    def generate(
        self,
        contexts: Sequence[Context],
        num_tokens: int,
        chunk: int | None = None,
        sampling: ResolvedSampling = GREEDY,
    ) -> list[list[int]]:
        """Generate `num_tokens` tokens for each context, in the same steps. Prompts are computed in
        chunks of `chunk` tokens."""
        outputs: list[list[int]] = [[] for _ in contexts]
        while any(len(output) < num_tokens for output in outputs):
            work = [
                (context, min(context.wanted, chunk or context.wanted))
                for context, output in zip(contexts, outputs, strict=True)
                if len(output) < num_tokens
            ]
            result = self.step(work, sampling)
            assert not result.errors
            for context, output in zip(contexts, outputs, strict=True):
                if context.context_id in result.tokens:
                    output.append(result.tokens[context.context_id])
                    context.tokens.append(output[-1])
                    context.num_output += 1
        return outputs
