"""Outputs of an engine core with drafts and without."""

import asyncio
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import StepRunner
from parrot.protocol.engine_api import DraftSources, GenerateResponse, StreamChunk
from parrot.protocol.sampling import SamplingConfig
from tests.support.manual_clock import ManualClock

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Output:
    response: GenerateResponse
    streamed: str

    @property
    def result(self) -> tuple[Any, ...]:
        """The parts of the output that must not depend on drafts."""
        r = self.response
        return r.generated_ids, r.generated_text, r.finish_reason, self.streamed


def outputs(
    runner: StepRunner,
    language: Language,
    prompts: Texts,
    samplings: Sequence[SamplingConfig],
    drafts: Texts | None = None,
) -> list[Output]:
    """The outputs of prompts that arrive together. `drafts` has a text for each prompt; outputs are
    drafted from that text and from themselves. Without `drafts`, the drafter is off."""
    most = 0 if drafts is None else 32
    config = BuiltinConfig(model="embedded", scheduler={"max_draft_tokens": most})
    # The clock does not move, so steps have no measured time. The drafter's choices then do not
    # depend on the machine.
    core = EngineCore(config, runner, language, ManualClock())
    outcomes: list[list[Any]] = [[] for _ in prompts]
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        constraint = None
        if language.grammars is not None:
            constraint = asyncio.run(language.grammars.constraint(sampling))
        wanted = EngineRequest(
            i,
            (Piece(i, array("i", prompt)),),
            # The runner identifies a job by this object, so each core needs its own copy.
            sampling=sampling.model_copy(),
            stream=True,
            constraint=constraint,
            drafts=DraftSources(texts=() if drafts is None else (list(drafts[i]),)),
        )
        core.requests.submit(wanted, outcomes[i].append)
    while core.has_work:
        core.wait_until_due()
        core.step()
        for call, argument in core.requests.outbox.take():
            call(argument)
        core.check_integrity()
    return [
        Output(o[-1], "".join(c.text for c in o if isinstance(c, StreamChunk))) for o in outcomes
    ]


def edited(ids: Sequence[int], most: int = 250) -> list[int]:
    """A copy with some tokens removed and some random tokens inserted."""
    numbers = random.Random(len(ids))
    kept = [i for i in ids if numbers.random() > 0.1]
    for _ in range(1 + len(ids) // 12):
        kept.insert(numbers.randrange(len(kept) + 1), numbers.randrange(most))
    return kept


def assert_drafts_change_nothing(
    runner: StepRunner, language: Language, prompts: Texts, samplings: Sequence[SamplingConfig]
) -> list[Output]:
    """Check that outputs do not change with drafts of the exact output, or of a similar text.
    Returns the outputs with exact drafts."""
    plain = outputs(runner, language, prompts, samplings)
    assert all(o.response.usage.drafted_tokens == 0 for o in plain)
    result = [o.response.generated_ids for o in plain]
    nearly = outputs(runner, language, prompts, samplings, [edited(ids) for ids in result])
    drafted = outputs(runner, language, prompts, samplings, result)
    for output in (nearly, drafted):
        assert [o.result for o in output] == [o.result for o in plain]
        for usage in [o.response.usage for o in output]:
            assert usage.accepted_tokens <= min(usage.drafted_tokens, usage.output_tokens)
    return drafted
