"""Reads of many variables against the real ServeCore with a scripted engine."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from parrot import P
from parrot.protocol.engine_api import FinishReason
from parrot.serve.readers import WAKE_DELAY_S
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.machine import machine_with


@P.semantic_function()
def try_it(number: P.Input, answer: P.Output):
    """Try {{number}}: {{answer}}"""


def number_in(prompt: str) -> str:
    return "".join(filter(str.isdigit, prompt))


class PickyEngine(FakeEngine):
    """An engine that hangs on odd numbers, and answers an even number with the number."""

    async def _maybe_hang(self, script: Script, num_chunks: int) -> None:
        if num_chunks == 0 and int(number_in(self.prompts[-1])) % 2:
            await self.resume.wait()
        await asyncio.sleep(0)


@pytest.fixture
def engine() -> FakeEngine:
    plain = fake_engine()
    return PickyEngine(plain.info, plain.tokenizer_response, Script(text=number_in))


@pytest.fixture
def vm(engine: FakeEngine) -> Iterator[P.VirtualMachine]:
    with machine_with(engine) as vm:
        yield vm


def wait_for_states(vm: P.VirtualMachine, *states: str) -> None:
    """Wait for states. An abandoned read is cancelled only when its connection is closed."""
    end = time.monotonic() + 10
    while tuple(call.state for call in vm.session_info().calls) != states:
        assert time.monotonic() < end, vm.session_info().calls


def test_the_first_results_win_and_other_calls_stop(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        answers = [try_it(number) for number in range(7)]
        winners = P.first_k(answers, 4, timeout=20)
        assert sorted(winner.content or "" for winner in winners) == ["0", "2", "4", "6"]
        assert set(winners) == set(answers[::2])
        assert all(answer.content is None for answer in answers[1::2])
        states = {call.output_var_id: call.state for call in vm.session_info().calls}
        assert [states[answer.id or ""] for answer in answers] == ["done", "idle"] * 3 + ["done"]
        again = P.first_k([answers[1], answers[4], answers[2]], 2)
        assert again == [answers[4], answers[2]]


def test_any_of_and_the_async_functions(vm: P.VirtualMachine) -> None:
    async def main() -> None:
        answers = [await try_it.ainvoke(number) for number in range(4)]
        first = await P.aany_of(answers[1:3])
        assert first is answers[2]
        assert await P.afirst_k(answers[:3], 2) == [answers[2], answers[0]]
        with pytest.raises(P.errors.TimedOut):
            await P.aany_of([answers[1], answers[3]], timeout=0.2)

    with vm.running_scope():
        asyncio.run(main())
        given = P.variable(content="there")
        assert P.any_of([try_it(1), given]) is given


def test_expired_deadlines_do_not_end_reads(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        assert try_it(2).get(deadline=0.001) == "2"
        assert "".join(try_it(4).stream(deadline=0.001)) != ""
        assert P.any_of([try_it(6)], deadline=0.001).content == "6"


def test_mistakes_are_reported_before_anything_is_sent(vm: P.VirtualMachine) -> None:
    x = P.variable("x")
    with vm.running_scope():
        for variables, k in (([x], 0), ([x], 2), ([], 1), ([x, x], 1)):
            with pytest.raises(ValueError, match=r"k is|twice"):
                P.first_k(variables, k)
        with pytest.raises(P.errors.InvalidRequest):
            P.first_k([x], 1)


def test_gather_returns_all_values_in_order_and_reports_progress(vm: P.VirtualMachine) -> None:
    progress_calls: list[tuple[int, int]] = []
    with vm.running_scope():
        given = P.variable(content="there")
        answers = [try_it(number) for number in (4, 2, 0)]
        variables = [*answers, given, answers[1]]
        assert P.gather(variables, progress=lambda *n: progress_calls.append(n)) == [
            "4", "2", "0", "there", "2",
        ]  # fmt: skip
        assert P.gather([]) == []
    assert progress_calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_gather_raises_the_first_error_at_once_and_stops_the_rest(
    vm: P.VirtualMachine, engine: FakeEngine
) -> None:
    with vm.running_scope():
        hangs, fails = try_it(1), P.variable("fails")
        threading.Timer(0.1, fails.cancel).start()
        with pytest.raises(P.errors.Cancelled):
            P.gather([hangs, fails])
        wait_for_states(vm, "idle")


def test_as_completed_yields_each_variable_and_failed_ones_raise(
    vm: P.VirtualMachine,
) -> None:
    progress_calls: list[tuple[int, int]] = []
    with vm.running_scope():
        fails = P.variable("fails")
        answers = [try_it(1), try_it(2), fails]
        fails.cancel()
        completed = P.as_completed(answers, progress=lambda *n: progress_calls.append(n))
        assert {next(completed), next(completed)} == set(answers[1:])
        assert answers[1].content == "2"
        with pytest.raises(P.errors.Cancelled):
            fails.get()
        completed.close()  # type: ignore[attr-defined]
        wait_for_states(vm, "idle", "done")
        with pytest.raises(P.errors.TimedOut):
            list(P.as_completed(answers[:2], timeout=0.1))
        with pytest.raises(ValueError, match="twice"):
            next(iter(P.as_completed([fails, fails])))
    assert progress_calls == [(1, 3), (2, 3)]


def test_the_same_for_async_code(vm: P.VirtualMachine) -> None:
    async def main() -> None:
        answers = [await try_it.ainvoke(number) for number in (0, 2, 4)]
        assert await P.agather(answers[:2]) == ["0", "2"]
        assert {answer async for answer in P.aas_completed(answers)} == set(answers)
        hangs = await try_it.ainvoke(1)
        reading = asyncio.create_task(P.agather([hangs, answers[0]]))
        await asyncio.sleep(0.1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert hangs.content is None

    with vm.running_scope():
        asyncio.run(main())


def test_a_variable_has_its_finish_reason_and_usage(
    vm: P.VirtualMachine, engine: FakeEngine
) -> None:
    with vm.running_scope():
        whole = try_it(2)
        assert (whole.finish_reason, whole.usage) == (None, None)
        whole.get()
        assert whole.finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len("Try 2: ")
        assert whole.usage.output_tokens == 2  # Including the stop token.
        engine.script = Script(text=number_in, finish_reason=FinishReason.LENGTH, stop_token=False)
        streamed, raced, cut = try_it(4), try_it(6), try_it(8)
        "".join(streamed.stream())
        P.any_of([raced])
        P.gather([cut])
        assert [v.finish_reason for v in (streamed, raced, cut)] == ["length"] * 3
        assert [v.usage.output_tokens for v in (streamed, raced, cut) if v.usage] == [1, 1, 1]
        states = [call.finish_reason for call in vm.session_info().calls]
        assert states == ["stop", "length", "length", "length"]
        given = P.variable(content="there")
        assert given.get() == "there"
        assert given.finish_reason is None


class Meeting(FakeEngine):
    """An engine that answers when it has received three requests."""

    async def _maybe_hang(self, script: Script, num_chunks: int) -> None:
        if num_chunks == 0 and len(self.prompts) == 3:
            self.resume.set()
        await super()._maybe_hang(Script(hang_after=0), num_chunks)


class TestBackground:
    @pytest.fixture
    def engine(self) -> FakeEngine:
        plain = fake_engine()
        return Meeting(plain.info, plain.tokenizer_response, Script(text=number_in))

    def test_a_fan_out_may_be_read_one_by_one(self, vm: P.VirtualMachine) -> None:
        with vm.running_scope():
            answers = [try_it(number) for number in range(3)]
            assert [answer.get(timeout=20) for answer in answers] == ["0", "1", "2"]

    def test_a_machine_or_a_function_can_run_calls_on_demand_only(
        self, vm: P.VirtualMachine, engine: FakeEngine
    ) -> None:
        engine.resume.set()
        on_demand = P.VirtualMachine(vm.core_http_addr, on_demand=True)
        with on_demand.running_scope():
            answers = [try_it(number) for number in range(2)]
            assert answers[1].get() == "1"
            time.sleep(2 * WAKE_DELAY_S)
            wait_for_states(on_demand, "idle", "done")
        lazy = P.semantic_function(on_demand=True)(lazily)
        with vm.running_scope():
            lazy(1)
            assert try_it(2).get() == "2"
            try_it(3)
            wait_for_states(vm, "idle", "done", "done")


def lazily(number: P.Input, answer: P.Output):
    """Try {{number}} lazily: {{answer}}"""
