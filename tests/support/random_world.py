"""Random requests to an engine core, with checks of their answers."""

import random
from array import array

from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.steps import StepRunner
from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.sampling import SamplingConfig
from tests.support.answer import Answer
from tests.support.runner_driver import Driver

LIMITS = {"max_gen_length": 12, "ignore_tokenizer_eos": True}
GREEDY = SamplingConfig.model_validate({"temperature": 0, **LIMITS})
DRAWN = SamplingConfig.model_validate({"top_p": 0.9, **LIMITS})
PENALIZED = SamplingConfig.model_validate(
    {
        "temperature": 0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.2,
        "logit_bias": {7: 3.0, 8: 2.5, 9: 2.0},
        **LIMITS,
    }
)


class World:
    """Contexts and their known tokens. The tokens of a context are unknown after a failed
    request."""

    def __init__(self, core: EngineCore, rng: random.Random, free_weight: float = 2.0) -> None:
        self._weights = [5, 20, free_weight, 0.5]
        self.core = core
        self.rng = rng
        self.running: dict[int, Answer] = {}
        self.texts: dict[int, list[int]] = {}
        self.greedy_answers: list[tuple[SamplingConfig, list[int], list[int]]] = []
        self.num_operations = 0
        self._kinds: dict[int, SamplingConfig | None] = {}
        self._next_id = 0

    def submit(self) -> None:
        """Fill or generate in a new context, which is usually a fork."""
        rng = self.rng
        parent = rng.choice([*(c for c in self.texts if c not in self.running), -1])
        known = self.texts.get(parent, [])
        prompt = [rng.randrange(250) for _ in range(rng.randint(1, 60))]
        if len(known) + len(prompt) > 350 or len(self.running) > 12:
            return
        number = self._next_id = self._next_id + 1
        kind = rng.choices([GREEDY, DRAWN, PENALIZED, None], [4, 2, 3, 2])[0]
        piece = Piece(number, array("i", prompt), parent, len(known) if known else None)
        answer = self.running[number] = Answer()
        self._kinds[number], self.texts[number] = kind, known + prompt
        self.core.requests.submit(EngineRequest(number, (piece,), sampling=kind), answer)

    def abort(self) -> None:
        if self.running:
            self.core.requests.abort(self.rng.choice([*self.running]))

    def free(self) -> None:
        """Free up to 4 contexts. In 1 of 5 cases, these may include contexts with a running
        request."""
        if not self.texts:
            return
        chosen = self.rng.sample([*self.texts], min(len(self.texts), 4))
        if self.rng.random() < 0.8:
            chosen = [c for c in chosen if c not in self.running]
        self.core.requests.free(chosen)
        for context in chosen:
            if context not in self.running:
                del self.texts[context]

    def step(self) -> None:
        self.core.step()

    def operate(self) -> None:
        operations = [self.submit, self.step, self.free, self.abort]
        self.rng.choices(operations, self._weights)[0]()
        self.num_operations += 1
        self.settle()

    def run(self, num_operations: int) -> None:
        """Run operations, then wait for all requests. The core's integrity is checked every 16
        operations and at the end."""
        while self.num_operations < num_operations:
            self.operate()
            if self.num_operations % 16 == 0:
                self.core.check_integrity()
        self.finish()
        self.core.check_integrity()

    def settle(self) -> None:
        for call, argument in self.core.requests.outbox.take():
            call(argument)
        for number, answer in list(self.running.items()):
            if answer.error is None and answer.response is None:
                continue
            del self.running[number]
            prompt, kind = self.texts.pop(number), self._kinds.pop(number)
            if answer.error is not None:
                continue
            output = []
            if isinstance(answer.response, GenerateResponse):
                output = answer.response.generated_ids
            self.texts[number] = prompt + output
            if kind is GREEDY or kind is PENALIZED:
                self.greedy_answers.append((kind, prompt, output))

    def finish(self) -> None:
        while self.core.has_work and self.core.step():
            pass
        self.settle()
        assert not self.running
        self.core.requests.free(range(self._next_id + 1))

    def check_answers(self, runner: StepRunner, num_answers: int) -> None:
        """Check that greedy requests, with or without penalties, have the tokens that `runner`
        gives for each of them alone."""
        driver = Driver(runner)
        for kind, prompt, output in self.rng.sample(
            self.greedy_answers, min(num_answers, len(self.greedy_answers))
        ):
            context = driver.context(prompt)
            assert driver.generate([context], len(output), sampling=kind) == [output]
            driver.release(context)
