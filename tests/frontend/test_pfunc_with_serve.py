"""Programs against the real ServeCore with a scripted engine."""

import asyncio
from collections.abc import Iterator

import pytest

from parrot import P
from parrot.serve.config import CoreConfig, TokenPrices
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import running_in_thread
from tests.support.fake_engine import FakeEngine, Script, fake_engine, register


@P.semantic_function()
def ask(question: P.Input, answer: P.Output):
    """Q {{question}} A {{answer}}"""


@P.semantic_function()
def begin(name: str):
    """You are {{name}}."""


@P.semantic_function()
def chat(human: P.Input, bot: P.Output):
    """| H {{human}} B {{bot}}"""


@P.semantic_function()
def two(first: P.Output, second: P.Output(P.SamplingConfig(logit_bias={3: 1.0}))):
    """One {{first}} two {{second}}"""


@P.semantic_function()
def guess(word: P.Input, out: P.Output(logprobs=2)):
    """{{word}}{{out}}"""


@P.native_function()
def shout(text: P.Input, loud: P.Output, length: P.Output):
    import re

    letters = re.sub("[^a-zA-Z]", "", text)
    loud.set(letters.upper())
    length.set(str(len(letters)))


@P.native_function()
def divide(text: P.Input, out: P.Output):
    out.set(str(1 / int(text)))


@pytest.fixture
def engine() -> FakeEngine:
    return fake_engine(script=Script(text=lambda prompt: f"[{prompt}]"))


@pytest.fixture
def core(engine: FakeEngine) -> ServeCore:
    config, clock = CoreConfig(), MonotonicClock()
    return ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda _: engine))


@pytest.fixture
def vm(core: ServeCore, engine: FakeEngine) -> Iterator[P.VirtualMachine]:
    with running_in_thread(create_app(core)) as url:
        asyncio.run(register(url, engine))
        yield P.VirtualMachine(url)
        core.check_integrity()


def test_calls_feed_each_other(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        question = P.variable("question")
        last = ask(ask(question))
        question.set("{{x}}")
        assert last.get("latency", timeout=20) == "[Q [Q {{x}} A ] A ]"


def test_streams_and_two_outputs(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        first, second = two()
        assert "".join(second.stream()) == "[One [One ] two ]"
        assert first.get() == "[One ]"
        info = vm.session_info()
    assert [call.output for call in info.calls] == ["first", "second"]


def test_how_likely_the_tokens_were(vm: P.VirtualMachine) -> None:
    """All kinds of reads return log probabilities."""
    with vm.running_scope():
        asked = [guess(word) for word in ("a", "b", "c")]
        assert asked[0].logprobs is None
        asked[0].get()
        assert "".join(asked[1].stream()) == "[b]"
        assert P.first_k([asked[2]], 1) == [asked[2]]
        for variable, word in zip(asked, "abc", strict=True):
            assert variable.logprobs is not None
            assert [one.token for one in variable.logprobs] == ["[", word, "]"]
            assert [one.bytes for one in variable.logprobs] == [[b] for b in f"[{word}]".encode()]
            for one in variable.logprobs:
                first, second = one.top_logprobs
                assert (first.token, first.logprob) == (one.token, one.logprob)
                assert second.bytes == [one.bytes[0] + 1]
        other = ask("x")
        other.get()
        assert other.logprobs is None


async def test_async_program(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        answers = await asyncio.gather(*[ask.ainvoke(i) for i in range(30)])
        texts = await asyncio.gather(*[answer.aget() for answer in answers])
        pieces = [piece async for piece in answers[0].astream()]
    assert texts == [f"[Q {i} A ]" for i in range(30)]
    assert pieces == [texts[0]]


def test_a_chat_remembers(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    with vm.running_scope():
        begin.invoke_statefully(chat, "Polly")
        assert chat.invoke_statefully(chat, human="hi").get() == "[You are Polly.| H hi B ]"
        chat.invoke_statefully(chat, human="and?").get()
    first, second = (prompt.replace("</s>", "") for prompt in engine.prompts)
    assert second.startswith(f"{first}[{first}]")
    assert second.endswith("| H and? B ")


def test_native_functions(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        loud, length = shout(ask("hey"))
        assert (loud.get(timeout=20), length.get(timeout=20)) == ("QHEYA", "5")
        with pytest.raises(P.errors.NativeFunctionFailed, match="ZeroDivisionError"):
            ask(divide(0)).get(timeout=20)


def test_errors_are_typed(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        lonely = P.variable("lonely")
        with pytest.raises(P.errors.TimedOut):
            ask(lonely).get(timeout=0.1)
        known = P.variable("known", content="x")
        with pytest.raises(P.errors.AlreadySet):
            ask("x", answer=known)
        answer = P.variable("answer")
        with pytest.raises(P.errors.CyclicGraph):
            ask(answer, answer=answer)


def test_cancel(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    engine.script = Script(hang_after=0)
    with vm.running_scope():
        answer = ask("x")
        answer.cancel()
        with pytest.raises(P.errors.Cancelled):
            answer.get(timeout=20)


def test_the_cost_of_a_program_follows_from_the_prices(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = {"*": TokenPrices(input=1e5, cached=1e4, output=1e6)}
    config, clock = CoreConfig(prices=prices), MonotonicClock()
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda _: engine))
    with running_in_thread(create_app(core)) as url:
        asyncio.run(register(url, engine))
        vm = P.VirtualMachine(url)

        def program() -> None:
            ask("x").get()
            (costs,) = vm.session_info().costs
            computed = costs.prompt_tokens - costs.cached_tokens
            prompt = 0.1 * computed + 0.01 * costs.cached_tokens
            assert costs.cost == pytest.approx(prompt + costs.output_tokens)
            assert costs.output_tokens > 0
            texts.append(f"{costs.cost:.2f}")

        texts: list[str] = []
        vm.run(program, report=True)
        table = [line.split() for line in capsys.readouterr().err.splitlines()]
        assert [row[-1:] for row in table] == [["cost"], *[texts] * 2]
