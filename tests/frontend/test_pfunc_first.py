"""`P.first_k` and `P.any_of` against the real ServeCore, with a scripted engine behind it."""

import asyncio
from collections.abc import Iterator

import pytest

from parrot import P
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from parrot.serve.api.app import create_app
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.testing.fake_engine import FakeEngine, Script, fake_engine
from parrot.testing.fake_serve import running_in_thread
from parrot.utils.clock import MonotonicClock


@P.semantic_function()
def try_it(number: P.Input, answer: P.Output):
    """Try {{number}}: {{answer}}"""


def number_in(prompt: str) -> str:
    return "".join(filter(str.isdigit, prompt))


class PickyEngine(FakeEngine):
    """Hangs for ever on odd numbers, and answers even ones with themselves."""

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
    config, clock = CoreConfig(), MonotonicClock()
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda _: engine))

    async def register(url: str) -> None:
        async with HttpClient(url) as http:
            await ServeClient(http).register_engine(engine.info)

    with running_in_thread(create_app(core)) as url:
        asyncio.run(register(url))
        yield P.VirtualMachine(url)
        core.check_integrity()


def test_the_first_win_and_the_losers_stop(vm: P.VirtualMachine) -> None:
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


def test_any_of_and_the_twins_for_async_code(vm: P.VirtualMachine) -> None:
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


def test_deadlines_end_nothing(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        assert try_it(2).get(deadline=0.001) == "2"
        assert "".join(try_it(4).stream(deadline=0.001)) != ""
        assert P.any_of([try_it(6)], deadline=0.001).content == "6"


def test_mistakes_are_told_before_anything_is_sent(vm: P.VirtualMachine) -> None:
    x = P.variable("x")
    with vm.running_scope():
        for variables, k in (([x], 0), ([x], 2), ([], 1), ([x, x], 1)):
            with pytest.raises(ValueError, match=r"k is|twice"):
                P.first_k(variables, k)
        with pytest.raises(P.errors.InvalidRequest):
            P.first_k([x], 1)
