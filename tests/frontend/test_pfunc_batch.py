"""Batches: all calls of a block go to ServeCore in one request."""

import asyncio
import threading

import pytest

from parrot import P
from parrot.protocol.errors import (
    AlreadySet,
    Cancelled,
    Conflict,
    CyclicGraph,
    InvalidRequest,
    ParrotError,
    QuotaExceeded,
    Unavailable,
    ValidationFailed,
)
from tests.support.fake_serve import FakeServe


@P.semantic_function()
def ask(question: P.Input, answer: P.Output):
    """Q {{question}} A {{answer}}"""


@P.semantic_function()
def style(how: P.Input, text: P.Input, styled: P.Output):
    """In style {{how}}: {{text}} {{styled}}"""


@P.semantic_function()
def combine(parts: P.Input, whole: P.Output):
    """All: {{parts}} {{whole}}"""


@P.native_function()
def shout(text: P.Input, loud: P.Output):
    loud.set(text.upper())


def test_a_program_of_21_calls_is_submitted_in_one_request(
    vm: P.VirtualMachine, serve: FakeServe
) -> None:
    with vm.running_scope():
        with vm.batch():
            parts = [ask(str(n)) for n in range(20)]
            whole = combine(parts)
            assert serve.num_requests == {}
            assert not whole.is_registered
        assert serve.num_requests == {"graph": 1}
        assert whole.is_registered
        text = whole.get()
        assert text.startswith("<All: <Q 0 A >\n<Q 1 A >\n")
        assert serve.num_requests == {"graph": 1, "get": 1}
    assert len(serve.calls) == 21


def test_the_calls_equal_those_without_a_batch(vm: P.VirtualMachine, serve: FakeServe) -> None:
    def program() -> str:
        first = ask("x")
        mine = P.variable("mine", content="text")
        styled = style("old", mine)
        target = P.variable("target")
        combine([first, styled, "end"], whole=target)
        return shout(target).get()

    texts = []
    for is_batch in (False, True):
        serve.reset()
        with vm.running_scope():
            if is_batch:
                with vm.batch():
                    texts.append(program())
            else:
                texts.append(program())
        names = [getattr(call, "func_name", None) for call in serve.calls]
        assert names == ["ask", "style", "combine", "shout"]
    assert serve.num_requests == {"graph": 1, "get": 1, "delete": 1}
    assert texts[0] == texts[1]


class TestWhatNeedsAnId:
    def test_a_read_in_the_block_sends_the_calls_so_far(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope(), vm.batch():
            first = ask("a")
            second = ask(first)
            assert first.get() == "<Q a A >"
            assert second.is_registered
            third = ask(second)
            assert P.gather([second, third]) == ["<Q <Q a A > A >", "<Q <Q <Q a A > A > A >"]
            assert "".join(ask("b").stream()) == "<Q b A >"
            winner = P.any_of([ask("c")])
            assert winner.get() == "<Q c A >"
        assert serve.num_requests["graph"] == 4

    def test_a_set_and_a_cancellation(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        with vm.running_scope(), vm.batch():
            question = P.variable("question")
            answer = ask(question)
            question.set("x")
            unwanted = ask("y")
            unwanted.cancel()
            assert answer.get() == "<Q x A >"
            with pytest.raises(Cancelled):
                unwanted.get()
            with pytest.raises(AlreadySet):
                question.set("z")

    def test_a_call_outside_of_the_block(self, vm: P.VirtualMachine, serve: FakeServe) -> None:
        with vm.running_scope():
            with vm.batch():
                first = ask("a")
                made = []

                def elsewhere() -> None:
                    made.append(ask(first).get())

                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
                second = ask(first)
            assert made == ["<Q <Q a A > A >"]
            assert second.get() == made[0]
        assert serve.num_requests["graph"] == 2
        assert serve.num_requests["call"] == 1

    def test_a_stateful_chat_continues_in_order(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope(), vm.batch():
            before = ask("a")
            ask.invoke_statefully(ask, before)
            later = ask("b")
        assert serve.num_requests == {"graph": 1, "call": 2, "delete": 1}
        assert later.is_registered


def test_a_variable_without_a_session_is_created_with_the_batch(
    vm: P.VirtualMachine, serve: FakeServe
) -> None:
    loose, known = P.variable("loose"), P.variable("known", content="k")
    with vm.running_scope():
        with vm.batch():
            answers = [ask(loose), ask(loose), ask(known)]
        loose.set("x")
        assert P.gather(answers) == ["<Q x A >", "<Q x A >", "<Q k A >"]
    assert serve.num_requests["graph"] == 1
    assert "create_var" not in serve.num_requests


def test_a_batch_in_a_batch_is_part_of_it(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        with vm.batch():
            first = ask("a")
            with vm.batch():
                second = ask(first)
            assert vm.map(ask, [second])
            assert serve.num_requests == {}
        assert serve.num_requests == {"graph": 1}


def test_an_empty_batch_sends_nothing(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        with vm.batch():
            pass
        assert serve.num_requests == {}
        ask("after")
        assert serve.num_requests == {"call": 1}


def test_a_large_batch_takes_several_requests(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        answers = vm.map(ask, [str(n) for n in range(1000)])
        assert serve.num_requests == {"graph": 2}
        large = vm.map(ask, ["x" * 3_000_000] * 4)
        assert serve.num_requests == {"graph": 4}
        wide = vm.map(combine, [[answers[0]] * 1000] * 5)
        assert serve.num_requests == {"graph": 6}
        assert all(var.is_registered for var in (*answers, *large, *wide))


async def test_async_batches(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        async with vm.batch():
            first, second = await asyncio.gather(ask.ainvoke("a"), ask.ainvoke("b"))
            whole = await combine.ainvoke([first, second])
        assert serve.num_requests == {"graph": 1}
        assert await whole.aget() == "<All: <Q a A >\n<Q b A > >"
        answers = await vm.amap(ask, ["c", "d"])
        assert await P.agather(answers) == ["<Q c A >", "<Q d A >"]
        assert serve.num_requests["graph"] == 2


async def test_a_task_that_outlives_the_block_sends_its_calls_itself(
    vm: P.VirtualMachine, serve: FakeServe
) -> None:
    go = asyncio.Event()

    async def late() -> str:
        await go.wait()
        answer = await ask.ainvoke("late")
        return await answer.aget()

    with vm.running_scope():
        async with vm.batch():
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
        go.set()
        assert await task == "<Q late A >"
    assert serve.num_requests["call"] == 1


class TestMap:
    def test_an_item_is_the_first_input_without_a_constant(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            assert P.gather(vm.map(style, ["new", "old"], text="t")) == [
                "<In style new: t >",
                "<In style old: t >",
            ]
            assert P.gather(vm.map(style, ["t", "u"], how="new"))[1] == "<In style new: u >"
            assert vm.map(ask, []) == []
            assert serve.num_requests["graph"] == 2

    def test_without_an_input_or_a_session(self, vm: P.VirtualMachine) -> None:
        with pytest.raises(InvalidRequest, match="no session"):
            vm.map(ask, ["x"])
        with vm.running_scope(), pytest.raises(TypeError, match=r"ask\(\) needs an input"):
            vm.map(ask, ["x"], question="y")
        with pytest.raises(InvalidRequest, match="no session"):
            vm.batch()


class TestErrors:
    def test_the_end_of_the_block_names_the_function(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():

            def make_twice(target: P.SemanticVariable) -> None:
                with vm.batch():
                    shout("x")
                    lost.append(ask("a", answer=target))
                    lost.append(ask("b"))
                    ask("c", answer=target)

            lost: list[P.SemanticVariable] = []
            with pytest.raises(
                Conflict, match=r"^ask\(\): `target` is already the output"
            ) as caught:
                make_twice(P.variable("target"))
            assert caught.value.param is None
            loose = P.SemanticVariable("mine")
            with pytest.raises(
                InvalidRequest, match=r"^ask\(\): the variable of .* is already the"
            ):
                make_twice(loose)
            assert serve.calls == []
            for var in (loose, lost[1], lost[3]):
                with pytest.raises(ParrotError, match=r"^ask\(\): .* is already the output"):
                    var.get()

    def test_a_cycle(self, vm: P.VirtualMachine) -> None:
        def circle() -> None:
            with vm.batch():
                end = P.variable("end")
                ask(ask(end), answer=end)

        with vm.running_scope(), pytest.raises(CyclicGraph, match="`end`"):
            circle()

    def test_a_wrong_value_is_rejected_where_it_is_given(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            with vm.batch():
                with pytest.raises(ValidationFailed, match=r"ask\(\): `parameters.0.value`"):
                    ask("x" * (16 * 2**20 + 1))
                with pytest.raises(TypeError):
                    ask()
                fine = ask("fine")
            assert fine.get() == "<Q fine A >"
        assert len(serve.calls) == 1

    def test_an_exception_in_the_block_drops_it(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        lost = []

        def fail() -> None:
            with vm.batch():
                lost.append(ask("a"))
                raise KeyError("x")

        with vm.running_scope():
            with pytest.raises(KeyError):
                fail()
            with pytest.raises(Cancelled, match="KeyError ended the batch"):
                lost[0].get()
            with pytest.raises(Cancelled, match="KeyError"):
                ask(lost[0])
            assert ask("b").get() == "<Q b A >"
        assert "graph" not in serve.num_requests

    def test_a_broken_connection_and_a_refusal(
        self, vm: P.VirtualMachine, serve: FakeServe
    ) -> None:
        with vm.running_scope():
            serve.errors["graph"] = [Unavailable("gone")]
            with vm.batch():
                answer = ask("a")
            assert serve.num_requests["graph"] == 2
            assert answer.get() == "<Q a A >"
            serve.errors["graph"] = [QuotaExceeded("full")]
            with pytest.raises(QuotaExceeded, match="full"), vm.batch():
                lost = ask("b")
            with pytest.raises(ParrotError, match="full"):
                lost.get()

    def test_variables_of_another_session(self, vm: P.VirtualMachine, url: str) -> None:
        other = P.VirtualMachine(url)
        with vm.running_scope():
            foreign = ask("a")
            with other.running_scope(), other.batch():
                with pytest.raises(InvalidRequest, match="does not belong to this session"):
                    ask(foreign)
                foreign.get()
                inner = ask(foreign)
                with vm.batch():
                    outer = ask("b")
            assert inner.session is not outer.session
