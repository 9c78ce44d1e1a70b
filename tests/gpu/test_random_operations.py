"""An engine on the device under random requests: nothing leaks, and nobody disturbs anybody.

PARROT_GPU_OPERATIONS is how many there are: 10,000 take a minute or two. Small cases are also good
for `compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_random_operations.py`."""

import os
import random
from array import array
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.plan import PENDING, LaunchedStep, StepPlan
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.sampling import SamplingConfig
from parrot.testing.runner_driver import Driver
from parrot.utils.clock import MonotonicClock
from tests.support.answer import Answer
from tests.support.tiny_model import make_tiny_model

SIZES = {"hidden_size": 64, "num_attention_heads": 4}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

NUM_BLOCKS = 40
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
    """Contexts and what they hold, as far as it is known: a failed request leaves its own in the
    dark."""

    def __init__(self, core: EngineCore, rng: random.Random) -> None:
        self.core = core
        self.rng = rng
        self.running: dict[int, Answer] = {}
        self.texts: dict[int, list[int]] = {}
        self.greedy_answers: list[tuple[SamplingConfig, list[int], list[int]]] = []
        self.num_operations = 0
        self._kinds: dict[int, SamplingConfig | None] = {}
        self._next_id = 0

    def submit(self) -> None:
        """Fill or generate, in a new context, mostly a fork."""
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
        """Now and then while a request runs on it."""
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
        self.rng.choices(operations, [5, 20, 2, 0.5])[0]()
        self.num_operations += 1
        self.settle()

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


def test_random_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy request, penalized or not, gets the tokens of an undisturbed runner."""
    config = BuiltinConfig.model_validate(
        {
            "model": str(make_tiny_model(tmp_path, overrides=SIZES)),
            "device": "cuda",
            "dtype": "float32",
            "scheduler": {"max_batch_size": 16, "max_num_batched_tokens": 128},
            "instance": {"num_kv_cache_blocks": NUM_BLOCKS, "block_size": 16, "max_seq_len": 400},
        }
    )
    runner, tokenizer = load_runner(config)
    assert isinstance(runner, CudaRunner)
    launch, prompts_ahead, penalized_ahead = runner.launch, [], []

    def watched(plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep | None:
        if previous is not None and plan.num_tokens > len(plan.sequences):
            prompts_ahead.append(plan.num_tokens)
        for sequence in plan.sequences:
            spec = sequence.sample
            if spec and spec.sampling is PENALIZED and sequence.token_ids[-1] == PENDING:
                penalized_ahead.append(spec.job_id)
        return launch(plan, previous)

    monkeypatch.setattr(runner, "launch", watched)
    core = EngineCore(config, runner, Language.of(tokenizer), MonotonicClock())
    world = World(core, random.Random(3))
    while world.num_operations < int(os.environ.get("PARROT_GPU_OPERATIONS", "2000")):
        world.operate()
        if world.num_operations % 16 == 0:
            core.check_integrity()
    world.finish()
    core.check_integrity()
    assert core.runtime_info().num_free_blocks == NUM_BLOCKS
    assert len(world.greedy_answers) > world.num_operations // 50
    assert len(prompts_ahead) > world.num_operations // 50
    assert len(penalized_ahead) > world.num_operations // 50
    driver = Driver(runner)
    for kind, prompt, output in world.rng.sample(
        world.greedy_answers, min(40, len(world.greedy_answers))
    ):
        context = driver.context(prompt)
        assert driver.generate([context], len(output), sampling=kind) == [output]
        driver.release(context)
