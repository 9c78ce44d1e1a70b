"""Run a single request in a fresh engine."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from parrot.engine.core.jobs import EngineRequest, Outcome, Piece, Response
from parrot.protocol.engine_api import DraftSources, GenerateResponse, StreamChunk
from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import SamplingConfig
from tests.fuzz import traces
from tests.fuzz.engines import calm, constraint, make_core
from tests.fuzz.expectations import SentRequest, Text
from tests.fuzz.traces import Ask, Setup


@dataclass
class Alone:
    """The outcome of the request, and its number of steps."""

    outcome: Response | ParrotError
    num_steps: int


def alone(setup: Setup, ask: Ask, prompt: Text, chunk: int | None = None) -> Alone:
    """Run a request with its whole prompt as one piece. Each step prefills `chunk` tokens."""
    piece = traces.Piece(ask.pieces[-1].context, prompt)
    only = Ask(ask.number, (piece,), ask.sampling, read=ask.read)
    core, _ = make_core(calm(setup, chunk))
    outcomes: list[Outcome] = []
    core.requests.submit(engine_request(only), outcomes.append)
    num_steps = 0
    while core.has_work and core.step():
        num_steps += 1
    for call, argument in core.requests.outbox.take():
        call(argument)
    [outcome] = outcomes
    assert not isinstance(outcome, StreamChunk)
    return Alone(outcome, num_steps)


def echo(setup: Setup, asked: SentRequest) -> Sequence[Text]:
    """Return a draft that is nearly the output of the request: some tokens are missing or added.
    Empty if the prompt is not known yet."""
    prompt = asked.prompt()
    if not prompt:
        return ()
    outcome = alone(setup, asked.ask, prompt).outcome
    if not isinstance(outcome, GenerateResponse):
        return ()
    rng = random.Random(asked.ask.number)
    text = [*prompt[-4:]]
    for token in outcome.generated_ids:
        text += rng.choices([[token], [], [token, 97]], [20, 1, 1])[0]
    return (tuple(text),)


def engine_request(ask: Ask, drafts: Sequence[Text] = ()) -> EngineRequest:
    sampling = None if ask.sampling is None else SamplingConfig.model_validate(ask.sampling)
    return EngineRequest(
        ask.number,
        tuple(Piece(p.context, array("i", p.tokens), p.parent, p.length) for p in ask.pieces),
        ask.priority,
        sampling,
        ask.stream,
        ask.salt,
        constraint=None if sampling is None else constraint(sampling),
        pooling="mean" if ask.read == "mean" else None,
        num_scored=2 if ask.read == "scores" else None,
        drafts=DraftSources(texts=[list(text) for text in drafts]),
    )
