"""Requests for an engine core in this thread, without a service."""

import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Outcome, Piece
from parrot.protocol.engine_api import GenerateResponse, Usage
from parrot.protocol.sampling import SamplingConfig


class Served(NamedTuple):
    """`seconds`: from the first request to the end of the last request."""

    seconds: float
    usages: list[Usage]
    outputs: list[list[int]]


def serve_all(core: EngineCore, requests: Sequence[tuple["array[int]", int]]) -> Served:
    """Run all requests (prompt, output tokens) at once, greedily, each with a new context, and
    then free the contexts."""
    outcomes: list[Outcome] = []
    began = time.perf_counter()
    for key, (prompt, output) in enumerate(requests):
        sampling = SamplingConfig(temperature=0.0, max_gen_length=output, ignore_tokenizer_eos=True)
        request = EngineRequest(key, (Piece(key, prompt),), sampling=sampling)
        core.requests.submit(request, outcomes.append)
    while core.has_work and core.step():
        pass
    core.requests.free(range(len(requests)))
    seconds = time.perf_counter() - began
    for call, argument in core.requests.outbox.take():
        call(argument)
    answers = [answer for answer in outcomes if isinstance(answer, GenerateResponse)]
    assert len(answers) == len(requests), outcomes
    outputs = [answer.generated_ids for answer in answers]
    return Served(seconds, [answer.usage for answer in answers], outputs)
