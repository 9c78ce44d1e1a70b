"""Retries and fallbacks of calls against the real ServeCore with a scripted engine."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any
from urllib.request import Request, urlopen

import pytest
from pydantic import BaseModel, Field

from parrot import P
from parrot.frontend.pfunc import session
from parrot.frontend.pfunc.semantic_variable import current_session
from parrot.protocol.errors import (
    AlreadySet,
    Cancelled,
    EngineFailed,
    InvalidRequest,
    NoEngine,
    PromptTooLong,
    Unavailable,
    ValidationFailed,
)
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.fake_serve import FakeServe
from tests.support.machine import machine_with


class Age(BaseModel):
    years: int = Field(ge=0)


@P.semantic_function()
def tell(text: P.Input) -> P.Returns[str]:
    """Tell {{text}} {{told}}"""


@P.semantic_function()
def careful_tell(text: P.Input) -> P.Returns[str]:
    """Carefully tell {{text}} {{told}}"""


@P.semantic_function(retries=2)
def age(text: P.Input) -> P.Returns[Age]:
    """Age of {{text}} {{age}}"""


@P.semantic_function(models=["tiny"])
def careful(text: P.Input, hint: str = "none") -> P.Returns[Age]:
    """Carefully, the age of {{text}}, {{hint}}: {{answer}}"""


@P.native_function()
def unknown(text: P.Input, age: P.Output):
    age.set('{"years": 0}')


@pytest.fixture
def engine() -> FakeEngine:
    return fake_engine()


@pytest.fixture
def vm(engine: FakeEngine) -> Iterator[P.VirtualMachine]:
    with machine_with(engine) as vm:
        yield vm


def say(engine: FakeEngine, *answers: str) -> None:
    engine.scripts += [Script(text=lambda _, text=text: text) for text in answers]


BAD, GOOD = '{"years": -1}', '{"years": 36}'


def test_an_invalid_output_is_retried(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    say(engine, "none", BAD, GOOD)
    with vm.running_scope():
        var = age("Ada")
        assert var.get() == Age(years=36)
        assert len(vm.session_info().calls) == 3
    assert engine.prompts == ["Age of Ada "] * 3


def test_dependent_calls_chain_on_pending_outputs(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    say(engine, BAD, GOOD)
    with vm.running_scope():
        var = age("Ada")
        told = tell(var)
        assert told.get().startswith("<")
        assert var.is_ready or var.get() == Age(years=36)
        assert (var.finish_reason, var.usage is None) == ("stop", False)
    assert engine.prompts[-1] == f"Tell {GOOD} "


def test_the_last_attempt_counts_as_it_is(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    say(engine, BAD, BAD, BAD)
    with vm.running_scope():
        var = age("Ada")
        told = tell(var)
        with pytest.raises(ValidationFailed, match="is not a valid Age"):
            var.get()
        assert var.content == BAD
        told.get()
    assert engine.prompts[-1] == f"Tell {BAD} "


def test_a_failed_call_is_retried_and_its_last_error_reaches_dependents(
    vm: P.VirtualMachine, engine: FakeEngine
) -> None:
    engine.script = Script(error=EngineFailed("broken"))
    with vm.running_scope():
        var = tell.with_options(retries=1)("x")
        with pytest.raises(EngineFailed, match="broken"):
            tell(var).get()
        with pytest.raises(EngineFailed):
            var.get()
        num_failed = len(vm.session_info().calls)
        engine.script = Script()
        assert tell.with_options(retries=1)("y").get()
    assert num_failed == 3


def test_permanent_failures_are_not_retried(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    engine.script = Script(error=PromptTooLong("too long"))
    with vm.running_scope():
        with pytest.raises(PromptTooLong):
            tell.with_options(retries=9)("x").get()
        assert len(vm.session_info().calls) == 2
        fallback = tell.with_options(retries=9, fallback=unknown)("x")
        assert fallback.get() == '{"years": 0}'
        assert len(vm.session_info().calls) == 4


def test_a_fallback_follows_with_its_own_attempts(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    last = careful.with_options(retries=1, fallback=unknown)
    chained = age.with_options(retries=1, fallback=last)
    say(engine, BAD, BAD, BAD, GOOD)
    with vm.running_scope():
        assert chained("Ada").get() == Age(years=36)
        assert engine.prompts == [
            *["Age of Ada "] * 2,
            *["Carefully, the age of Ada, none: "] * 2,
        ]
        say(engine, *[BAD] * 4)
        assert chained("Ada").get() == Age(years=0)


def test_a_slow_attempt_is_abandoned(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    engine.scripts = [Script(hang_after=1), Script(text=lambda _: "quick")]
    with vm.running_scope():
        told = tell.with_options(fallback=tell, attempt_timeout=0.2)("x")
        assert told.get(timeout=20) == "quick"
        states = [call.state for call in vm.session_info().calls]
    assert sorted(states) == ["cancelled", "done"]


def test_a_slow_attempt_that_cannot_be_cancelled_is_abandoned(
    vm: P.VirtualMachine, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel(*_: Any) -> None:
        raise Unavailable("broken")

    monkeypatch.setattr(session.Session, "cancel", cancel)
    engine.scripts = [Script(hang_after=1), Script(text=lambda _: "quick")]
    with vm.running_scope():
        told = tell.with_options(fallback=tell, attempt_timeout=0.2)("x")
        assert told.get(timeout=20) == "quick"


def test_the_time_of_an_attempt_is_for_all_its_outputs(
    vm: P.VirtualMachine, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @P.semantic_function(retries=1, attempt_timeout=30.0)
    def both(text: P.Input) -> P.Returns[tuple[str, str]]:
        """{{text}} {{name}} is {{age}}"""

    limits, watch = [], session.Session.watch

    async def watched(self: session.Session, var_id: str, name: str, options: Any) -> Any:
        limits.append(options["timeout_s"])
        return await watch(self, var_id, name, options)

    monkeypatch.setattr(session.Session, "watch", watched)
    say(engine, "Ada", "36")
    with vm.running_scope():
        assert P.gather([both("Who?")], timeout=20) == [("Ada", "36")]
    assert 30 >= limits[0] > limits[1] > 0


def test_a_rejected_attempt_counts_as_failed(
    vm: P.VirtualMachine, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals, submit = [NoEngine("none"), NoEngine("none")], session.Session.semantic_call

    async def submitted(self: session.Session, subject: str, payload: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await submit(self, subject, payload)

    later: list[NoEngine] = []
    submit_graph = session.Session.submit_graph

    async def submitted_once(self: session.Session, *args: Any) -> Any:
        if later:
            raise later[0]
        later.append(NoEngine("none"))
        return await submit_graph(self, *args)

    monkeypatch.setattr(session.Session, "semantic_call", submitted)
    say(engine, BAD, GOOD)
    with vm.running_scope():
        assert age.with_options(retries=3)("Ada").get(timeout=20) == Age(years=36)
        say(engine, BAD)
        monkeypatch.setattr(session.Session, "submit_graph", submitted_once)
        unasked = age.with_options(retries=1)("Ada")
        with pytest.raises(Cancelled):
            unasked.get(timeout=20)


def test_feedback_follows_the_output(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    say(engine, BAD, "nothing", GOOD)
    asked = age.with_options(feed_back=True)
    with vm.running_scope():
        assert asked("Ada").get() == Age(years=36)
    first, second, third = engine.prompts
    assert second.startswith(f"{first}{BAD}\nThat is not valid: ")
    assert "greater than or equal to 0" in second
    assert third.startswith(f"{second}nothing\nThat is not valid: ")
    chatted = P.semantic_function(
        conversation_template=P.chat_template.with_system("Count."), retries=1, feed_back=True
    )(careful.pyfunc)
    say(engine, BAD, GOOD)
    with vm.running_scope():
        assert chatted("Ada").get() == Age(years=36)
    assert engine.prompts[-1].count("Count.") == 1
    assert BAD in engine.prompts[-1]
    assert engine.prompts[-1].count("<|im_start|>user") == 2


def test_functions_of_several_outputs(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    @P.semantic_function(retries=1)
    def both(text: P.Input) -> P.Returns[tuple[str, Age]]:
        """{{text}} {{name}} is {{age}}"""

    say(engine, "Ada", BAD, "Bob", GOOD)
    with vm.running_scope():
        name, years = both("Who?")
        assert P.gather([(name, years)]) == [("Bob", Age(years=36))]
        say(engine, "Eve", BAD, "Joe", GOOD)
        assert P.any_of([both("Who?")[0]]).get() == "Joe"


def test_maps_are_one_request(engine: FakeEngine, url: str, serve: FakeServe) -> None:
    vm = P.VirtualMachine(url)
    again = tell.with_options(retries=3)
    with vm.running_scope():
        with vm.batch():
            told = vm.map(again, ["a", "b", "c"])
            ends = vm.map(again, told)
            assert serve.num_requests == {}
        assert serve.num_requests["graph"] == 1
        assert P.gather(ends)[0] == "<Tell <Tell a > >"
        assert len(serve.calls) == 6


def test_calls_wait_only_for_their_inputs(
    vm: P.VirtualMachine, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few connections, reads of the program and dependent attempts do not block the attempts
    that they wait for."""
    monkeypatch.setattr(session, "_NUM_READS", 4)
    monkeypatch.setattr(session, "_NUM_TRIALS", 4)
    seen: set[str] = set()

    def bad_at_first(prompt: str) -> str:
        is_new = prompt not in seen
        seen.add(prompt)
        return BAD if is_new else GOOD[:-1] + f', "of": "{len(prompt)}"' + "}"

    engine.script = Script(text=bad_at_first)
    with vm.running_scope():
        first = vm.map(age, [f"{number:03}" for number in range(20)])
        second = vm.map(age, first)
        assert P.gather([*second, *first], timeout=60) == [Age(years=36)] * 40


async def test_async_code_and_variables_of_one_s_own(
    vm: P.VirtualMachine, engine: FakeEngine
) -> None:
    say(engine, BAD, GOOD)
    with vm.running_scope():
        target = P.variable("target")
        told = await tell.ainvoke(target)
        made: Any = await age.ainvoke("Ada", age=target)  # type: ignore[call-arg]
        assert made is target
        await told.aget()
        assert engine.prompts[-1] == f"Tell {GOOD} "
        with pytest.raises(AlreadySet):
            await age.ainvoke("Ada", age=target)  # type: ignore[call-arg]


def test_a_dropped_batch_and_cancellations(
    vm: P.VirtualMachine, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), vm.running_scope():
        lost: list[P.SemanticVariable[Age]] = []
        with suppress(ZeroDivisionError), vm.batch():
            lost.append(age("Ada"))
            lost.append(1 / 0)  # type: ignore[arg-type]
        with pytest.raises(Cancelled):
            lost[0].get()
        engine.script = Script(hang_after=0)
        slow = age("Eve")
        told = tell(slow)
        slow.cancel()
        for var in (slow, told):
            with pytest.raises(Cancelled):
                var.get(timeout=10)
        source = P.variable("source")
        waiting = age(source)
        source.cancel()
        with pytest.raises(Cancelled):
            waiting.get(timeout=10)
        mine = P.variable("mine")
        age("Bob", age=mine)  # type: ignore[call-arg]
        mine.set(GOOD)
        assert mine.get() == Age(years=36)
        age("Zoe")  # This call is still running when the session ends.


def test_a_cancelled_call_stops_at_its_engine(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    engine.script = Script(hang_after=1)
    with vm.running_scope():
        var = age("Eve")
        wait_for_state(vm, "running")
        var.cancel()
        wait_for_state(vm, "idle")


def wait_for_state(vm: P.VirtualMachine, state: str) -> None:
    """Wait for a state that ServeCore reaches after a connection is opened or closed."""
    end = time.monotonic() + 10
    while [call.state for call in vm.session_info().calls] != [state]:
        assert time.monotonic() < end, vm.session_info().calls


def test_invalid_options_of_retries_and_fallbacks() -> None:
    def two(text: P.Input) -> P.Returns[tuple[str, str]]:
        """{{text}} {{a}} {{b}}"""

    def none(text: P.Input) -> None:
        """{{text}}"""

    decorate: Any = P.semantic_function
    for options, error, message in (
        ({"retries": -1}, ValueError, "retries must be in 0"),
        ({"retries": "2"}, TypeError, "retries"),
        ({"feed_back": True}, ValueError, "feed_back needs retries"),
        ({"attempt_timeout": 3}, ValueError, "attempt_timeout needs retries"),
        ({"retries": 1, "attempt_timeout": 0}, ValueError, "attempt_timeout needs"),
        ({"fallback": len}, TypeError, "must be a semantic or native function"),
        ({"fallback": tell}, ValueError, "`tell` has 1 output, but `two` has 2 outputs"),
        ({"retries": 1, "feed_back": True}, ValueError, "one output"),
    ):
        with pytest.raises(error, match=message):
            decorate(**options)(two)
    with pytest.raises(ValueError, match="needs `text`, but `other` has no such parameter"):

        @P.semantic_function(fallback=tell)
        def other(x: P.Input) -> P.Returns[str]:
            """{{x}} {{y}}"""

    with pytest.raises(TypeError, match="remove_pure_fill"):
        tell.with_options(remove_pure_fill=False)
    with pytest.raises(TypeError, match="unknown option `model`"):
        tell.with_options(model="m")
    assert tell.with_options(models=["a"], reuse=False).metadata.models == ("a",)
    assert age.with_options(retries=0).attempts.are_many is False


def test_only_calls_without_retries_keep_contexts(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        with pytest.raises(InvalidRequest, match="cannot be called statefully"):
            age.invoke_statefully(age, "Ada")
        tell.invoke_statefully(age, "Ada")
        with pytest.raises(InvalidRequest, match="cannot be called statefully"):
            age("Bob")


def test_a_retry_reaches_the_engine_although_results_are_reused(engine: FakeEngine) -> None:
    """Otherwise each attempt of a greedy call would get the same invalid text."""

    @P.semantic_function(retries=1)
    def greedy(
        text: P.Input,
    ) -> Annotated[P.Returns[Age], P.SamplingConfig(temperature=0, max_gen_length=20)]:
        """Age of {{text}} {{age}}"""

    say(engine, BAD, GOOD)
    with machine_with(engine) as vm, vm.running_scope():
        assert greedy("Ada").get() == Age(years=36)
    assert len(engine.prompts) == 2


def hanging_call(engine: FakeEngine) -> P.SemanticVariable:
    """The output of a call with retries and a fallback, which the engine never answers."""
    engine.script = Script(hang_after=0)
    var: P.SemanticVariable = tell.with_options(retries=2, fallback=careful_tell)("x")
    while not engine.requests:
        time.sleep(0.01)
    return var


def test_a_cancelled_call_does_not_go_to_its_fallback(
    vm: P.VirtualMachine, engine: FakeEngine
) -> None:
    with vm.running_scope():
        var = hanging_call(engine)
        var.cancel()
        with pytest.raises(Cancelled):
            var.get(timeout=20)
        time.sleep(0.2)
        assert len(engine.prompts) == 1


def test_a_call_that_an_operator_cancels_does_not_go_to_its_fallback(
    vm: P.VirtualMachine, engine: FakeEngine
) -> None:
    with vm.running_scope():
        var = hanging_call(engine)
        session_id, session_auth = current_session.of_context.get()._scope
        body = json.dumps({"session_id": session_id, "session_auth": session_auth}).encode()
        path = f"{vm.core_http_addr}/v1/request/1/cancel"
        with urlopen(Request(path, body, {"Content-Type": "application/json"})) as answer:
            assert answer.status == 200
        with pytest.raises(Cancelled):
            var.get(timeout=20)
        assert len(engine.requests) == 1
