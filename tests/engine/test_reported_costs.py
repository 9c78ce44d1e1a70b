"""The step costs that an engine reports to ServeCore."""

import asyncio
from dataclasses import replace

import pytest

from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import RunnerInfo
from parrot.engine.openai.service import AnswerCosts
from parrot.engine.service import RunnerService
from parrot.engine.sim import SimDriver, SimRunner, SimService, byte_tokenizer_response
from parrot.protocol.engine_api import FillPiece, GenerateRequest, ServerLoad, StepCosts, Usage
from parrot.protocol.sampling import SamplingConfig
from parrot.simulation import run_virtual
from parrot.simulation.loop import LoopClock
from tests.support.manual_clock import ManualClock

CONFIG = SimConfig.model_validate(
    {"instance": {"step_s": 0.02, "sequence_s": 4e-4, "prefill_token_s": 2e-4}}
)


class UnknownRunner(SimRunner):
    """A simulated runner that does not report its costs."""

    @property
    def info(self) -> RunnerInfo:
        return replace(super().info, costs=None)


async def generate(service: RunnerService, number: int) -> None:
    prompt = [97 + number % 20] * (20 + 100 * (number % 7))
    await service.generate(
        GenerateRequest(
            context_id=number,
            fills=[FillPiece(context_id=number, token_ids=prompt)],
            sampling_config=SamplingConfig(max_gen_length=10 + number % 13),
        )
    )


def test_an_engine_measures_its_steps_from_its_warm_up_on() -> None:
    async def main() -> tuple[StepCosts | None, StepCosts | None]:
        clock = LoopClock()
        runner = UnknownRunner(CONFIG.instance, clock)
        core = EngineCore(CONFIG, runner, Language.of(byte_tokenizer_response()), clock)
        driver = SimDriver(core, clock, runner)
        service = RunnerService(CONFIG, driver, warm_up=True)
        await service.start()
        at_first = service.engine_info().costs
        for first in range(0, 120, 12):
            await asyncio.gather(
                *[generate(service, n) for n in range(first, first + 1 + first % 11)]
            )
        later = service.runtime_info().costs
        await service.close()
        return at_first, later

    at_first, later = run_virtual(main())
    assert at_first is not None
    assert at_first.step_s == pytest.approx(0.02, rel=0.5)
    assert later is not None
    assert later.step_s == pytest.approx(0.02, rel=0.1)
    assert later.prefill_s == pytest.approx(2e-4, rel=0.1)


def test_a_simulated_engine_reports_its_configured_costs_and_its_slowdown() -> None:
    async def main() -> None:
        service = SimService(CONFIG, LoopClock())
        await service.start()
        costs = service.engine_info().costs
        assert costs == StepCosts(step_s=0.02, sequence_s=4e-4, token_s=3e-8, prefill_s=2e-4)
        service.slow_down(3.0)
        slower = service.runtime_info().costs
        assert slower is not None
        assert slower.step_s == pytest.approx(0.06)
        await service.close()

    run_virtual(main())


@pytest.mark.parametrize("max_others", [0, 5])
def test_step_costs_are_estimated_from_the_answers_of_a_foreign_server(max_others: int) -> None:
    """A step takes 20 ms, plus 2 ms for each running answer of all clients. A prompt takes 1 ms per
    token."""
    clock = ManualClock()
    costs = AnswerCosts(clock)
    assert costs.costs() is None
    for number in range(600):
        num_answers, num_tokens = 1 + number % 8, 10 + number % 90
        num_others = number % (max_others + 1)
        costs.set_external_load(ServerLoad(num_others=num_others, other_tokens=100 * num_others))
        answers = [costs.answering(100) for _ in range(num_answers)]
        running = [answer.__enter__() for answer in answers]
        prompt = 20 * (number % 5)
        clock._now += num_tokens * (0.02 + 0.002 * (num_answers + num_others))
        clock._now += prompt * num_answers * 0.001
        for answer in running:
            answer.usage = Usage(output_tokens=num_tokens, computed_tokens=prompt)
        for answer in answers:
            answer.__exit__(None, None, None)
    found = costs.costs()
    assert found is not None
    assert found.decode_step_s(1, 100) == pytest.approx(0.022, rel=0.15)
    assert found.decode_step_s(8, 800) == pytest.approx(0.036, rel=0.15)
    assert found.prefill_s == pytest.approx(0.001, rel=0.6)


def test_a_failed_answer_is_not_measured() -> None:
    clock = ManualClock()
    costs = AnswerCosts(clock)

    def fail() -> None:
        with costs.answering(100):
            clock._now += 1.0
            raise OSError("reset")

    with pytest.raises(OSError, match="reset"):
        fail()
    assert costs.costs() is None
