"""The guarantees of both drivers when a verb or the device fails."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import StepPlan, StepResult
from parrot.engine.http_server import run_engine
from parrot.engine.service import (
    Driver,
    RunnerService,
    ServiceState,
    ThreadDriver,
    ask,
    deliver,
    settle,
)
from parrot.engine.sim import SimDriver, SimRunner, byte_tokenizer_response
from parrot.protocol.engine_api import FillRequest, GenerateResponse
from parrot.protocol.errors import EngineFailed, Unavailable
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock

COSTS = ("step_s", "sequence_s", "context_token_s", "prefill_token_s")
CONFIG = SimConfig.model_validate({"instance": dict.fromkeys(COSTS, 0.0)})


class BlockingRunner(SimRunner):
    """Steps wait until `may_run` is set, as on a stuck device."""

    def __init__(self) -> None:
        super().__init__(CONFIG.instance, MonotonicClock())
        self.may_run = threading.Event()
        self.may_run.set()
        self.is_stuck = threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        if not self.may_run.is_set():
            self.is_stuck.set()
        self.may_run.wait()
        return super().run(plan)


def make_core(runner: SimRunner | None = None) -> EngineCore:
    language = Language.of(byte_tokenizer_response())
    clock = MonotonicClock()
    return EngineCore(CONFIG, runner or SimRunner(CONFIG.instance, clock), language, clock)


def on_loop() -> Driver:
    clock = MonotonicClock()
    return SimDriver(make_core(), clock, SimRunner(CONFIG.instance, clock))


def in_thread() -> Driver:
    return ThreadDriver(make_core)


@pytest.fixture(params=[on_loop, in_thread])
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    make: Callable[[], Driver] = request.param
    driver = make()
    await driver.start()
    yield driver
    await driver.close()


def submit(driver: Driver, number: int, sampling: object) -> "asyncio.Future[Any]":
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    piece = Piece(number, array("i", list(b"abc")))
    wanted = EngineRequest(number, (piece,), sampling=sampling)  # type: ignore[arg-type]
    driver.post(lambda core: core.requests.submit(wanted, partial(settle, answer)))
    return answer


async def check_serves(driver: Driver, number: int) -> None:
    answer = await submit(driver, number, SamplingConfig(max_gen_length=3))
    assert isinstance(answer, GenerateResponse)
    assert len(answer.generated_ids) == 3
    await ask(driver, lambda core: core.check_integrity())


async def test_a_verb_that_fails_affects_no_request(driver: Driver) -> None:
    running = submit(driver, 1, SamplingConfig(max_gen_length=200))
    driver.post(lambda core: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        await ask(driver, lambda core: 1 / 0)
    answer = await running
    assert isinstance(answer, GenerateResponse)
    assert len(answer.generated_ids) == 200
    await check_serves(driver, 2)


async def test_a_request_that_cannot_be_submitted_fails_alone(driver: Driver) -> None:
    running = submit(driver, 1, SamplingConfig(max_gen_length=200))
    broken = submit(driver, 2, object())
    with pytest.raises(EngineFailed, match="internal error"):
        await broken
    assert isinstance(await running, GenerateResponse)
    await check_serves(driver, 3)


def test_a_sink_that_fails_does_not_affect_other_sinks() -> None:
    got: list[int] = []
    deliver([(lambda _: 1 / 0, None), (got.append, 7)])
    assert got == [7]


async def test_an_engine_whose_thread_has_died_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(BaseException):
        pass

    def die(core: EngineCore) -> None:
        raise Died

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    driver = ThreadDriver(make_core)
    await driver.start()
    running = submit(driver, 1, SamplingConfig(max_gen_length=30_000))
    assert not driver.is_lost
    driver.post(die)
    with pytest.raises(Unavailable):
        await running
    assert driver.is_lost
    await driver.close()


async def test_an_engine_with_a_stuck_device_reports_no_steps_and_can_be_closed() -> None:
    runner = BlockingRunner()
    driver = ThreadDriver(lambda: make_core(runner), patience_s=0.05)
    service = RunnerService(CONFIG, driver, warm_up=True)
    await service.start()
    before = service.runtime_info()
    runner.may_run.clear()
    stuck = asyncio.ensure_future(service.fill(FillRequest(context_id=1, token_ids=[1])))
    await asyncio.to_thread(runner.is_stuck.wait)
    later = asyncio.ensure_future(service.fill(FillRequest(context_id=2, token_ids=[1])))
    await asyncio.sleep(0)
    info = service.runtime_info()
    assert (info.num_steps, info.num_total_jobs) == (before.num_steps, 1)
    assert service.state() is not ServiceState.LOST
    await service.close()
    for task in (stuck, later):
        task.cancel()
    runner.may_run.set()


async def test_an_engine_that_is_closed_during_its_warm_up_ends_without_an_error() -> None:
    runner = BlockingRunner()
    runner.may_run.clear()
    service = RunnerService(CONFIG, ThreadDriver(lambda: make_core(runner)), warm_up=True)
    engine = asyncio.create_task(run_engine(CONFIG, service, None))
    await asyncio.to_thread(runner.is_stuck.wait)
    closing = asyncio.create_task(service.close())
    await asyncio.sleep(0)
    runner.may_run.set()
    await asyncio.gather(closing, engine)
