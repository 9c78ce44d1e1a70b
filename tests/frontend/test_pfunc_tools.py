"""Tools: the description of a function for a model, and agents that call tools."""

import asyncio
import inspect
import json
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from parrot import P
from parrot.frontend.pfunc.tools import agent as agent_module
from parrot.frontend.pfunc.tools.turns import TextFilter, read_calls
from parrot.protocol.errors import EngineFailed, InvalidRequest
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.machine import machine_with


class Point(BaseModel):
    x: int


@P.tool
def weather(
    city: str,
    unit: Literal["C", "F"] = "C",
    days: Annotated[int, Field(ge=1, le=9)] = 1,
    near: list[Point] | None = None,
) -> dict[str, Any]:
    """The weather of a city.

    Args:
        city: its name,
            in English.
        unit (str): of the temperature.

    Returns:
        What it will be.
    """
    if city == "Atlantis":
        raise LookupError("no such\ncity")
    return {"city": city, "unit": unit, "days": days, "near": near}


@P.tool(name="clock", description="The time.", max_chars=5)
async def now(zone: str) -> str:
    await asyncio.sleep(0)
    return f"12:34 {zone}"


class TestTool:
    def test_the_description_for_the_model(self) -> None:
        about = weather.json_schema["function"]
        assert about["name"] == "weather"
        assert about["description"] == "The weather of a city."
        schema = about["parameters"]
        jsonschema.Draft202012Validator.check_schema(schema)
        properties = schema["properties"]
        assert list(properties) == ["city", "unit", "days", "near"]
        assert properties["city"] == {"type": "string", "description": "its name, in English."}
        assert properties["unit"]["enum"] == ["C", "F"]
        assert properties["unit"]["description"] == "of the temperature."
        assert (properties["days"]["maximum"], schema["required"]) == (9, ["city"])
        assert schema["additionalProperties"] is False
        assert now.json_schema["function"]["description"] == "The time."

    def test_other_docstrings(self) -> None:
        @P.tool
        def plain(x: int, y: str = "") -> None:
            """Does something
            in two lines.

            :param x: a number
            :param str y: a text
            :returns: nothing
            """

        about = plain.json_schema["function"]
        assert about["description"] == "Does something\nin two lines."
        properties = about["parameters"]["properties"]
        assert [part["description"] for part in properties.values()] == ["a number", "a text"]

        @P.tool
        def silent() -> int:
            return 3

        assert silent.json_schema["function"]["description"] == ""
        assert silent.parameters["properties"] == {}
        assert silent.run({}) == "3"

    def test_a_tool_is_still_callable(self) -> None:
        assert weather("Oslo")["city"] == "Oslo"
        assert list(inspect.signature(weather).parameters) == ["city", "unit", "days", "near"]
        assert (weather.__doc__ or "").startswith("The weather")
        assert asyncio.run(now("UTC")) == "12:34 UTC"

    def test_arguments_are_checked_and_results_are_texts(self) -> None:
        shown = json.loads(weather.run({"city": "Oslo", "days": "2", "near": [{"x": 1}]}))
        assert shown == {"city": "Oslo", "unit": "C", "days": 2, "near": [{"x": 1}]}
        assert asyncio.run(now.arun({"zone": "UTC"})) == "12:34... (4 more characters)"
        for wrong in ({}, {"city": "Oslo", "days": 10}, {"city": "Oslo", "what": 1}):
            with pytest.raises(ValidationError):
                weather.run(wrong)

    def test_invalid_tools(self) -> None:
        with pytest.raises(ValueError, match="cannot be the name of a tool"):
            P.tool(lambda x: x)
        with pytest.raises(ValueError, match="cannot be passed by name"):
            P.tool(lambda *xs: xs, name="f")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="max_chars must be at least 1"):
            P.tool(name="f", max_chars=0)(lambda x: x)

        for timeout in (0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="timeout must be a positive number"):
                P.tool(name="f", timeout=timeout)(lambda x: x)

        def opaque(x: FakeEngine) -> None: ...

        def unknown(x: "NoSuchType") -> None: ...  # type: ignore[name-defined]  # noqa: F821

        for function in (opaque, unknown):
            with pytest.raises(TypeError, match="cannot be described by a JSON schema"):
                P.tool(function)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@given(st.text("<tol_ca>/x{}"), st.integers(1, 5))
def test_the_filter_removes_calls_for_any_chunk_size(text: str, size: int) -> None:
    whole = f"{text}{called('f', x='<tool_call')}{text} <tool"
    text_filter = TextFilter()
    pieces = [text_filter.feed(whole[i : i + size]) for i in range(0, len(whole), size)]
    if "<tool_call>" not in text and "</tool_call>" not in text:
        assert "".join(pieces) + text_filter.finish() == f"{text}{text} <tool"


def test_calls_that_cannot_be_read() -> None:
    deep = "<tool_call>" + "[" * 100_000
    for text in (
        deep,
        "<tool_call>{",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
    ):
        (call,) = read_calls(text, 1)
        assert "cannot be read" in str(call.error)
    (call,) = read_calls('<tool_call>{"name": "f", "arguments": {}} g</tool_call>', 1)
    assert "more follows: ' g'" in str(call.error)
    assert read_calls("no call", 1) == []


def test_a_call_that_was_cut_after_its_arguments_is_complete() -> None:
    whole = called("f", x=1)
    for end in range(len(whole) - len("\n</tool_call>"), len(whole) + 1):
        assert read_calls(whole[:end], 1) == [P.ToolCall("f", {"x": 1})]


@pytest.fixture
def engine() -> FakeEngine:
    return fake_engine()


@pytest.fixture
def vm(engine: FakeEngine) -> Iterator[P.VirtualMachine]:
    with machine_with(engine) as vm:
        yield vm


def say(engine: FakeEngine, *answers: str) -> None:
    engine.scripts += [Script(text=lambda _, text=text: text, steps=7) for text in answers]


class TestAgent:
    def test_results_and_errors_are_sent_in_the_next_turn(
        self, vm: P.VirtualMachine, engine: FakeEngine
    ) -> None:
        say(
            engine,
            "Let me see. "
            + called("weather", city="Oslo")
            + called("weather", city="Atlantis")
            + called("climate")
            + called("weather", days=0),
            called("weather", city="Rome") + "<tool_call>",
            "It is cold.",
        )
        agent = P.Agent(
            [weather], "You know the weather.", sampling_config=P.SamplingConfig(seed=1)
        )
        with vm.running_scope():
            run = agent.stream("How is it in Oslo?")
            assert "".join(run) == "Let me see. It is cold."
            assert str(run) == run.text == "It is cold."
            assert run.num_turns == 3
            assert [call.name for call in run.calls] == [
                "weather",
                "weather",
                "climate",
                "weather",
                "weather",
                "",
            ]
            results = [call.result for call in run.calls]
            assert json.loads(results[0])["city"] == "Oslo"
            assert results[1] == "Error: LookupError: no such city"
            assert results[2] == "Error: InvalidRequest: there is no tool `climate`, only weather"
            assert results[3].startswith("Error: wrong arguments: `city`: Missing")
            assert "`days`" in results[3]
            assert results[5].startswith("Error: InvalidRequest: the call cannot be read")
            assert isinstance(run.calls[1].error, LookupError)
            assert repr(run).startswith("<AgentRun: 3 turns, calls [weather, weather, ")
            assert "<td>{&#x27;city&#x27;: &#x27;Oslo&#x27;}</td>" in run._repr_html_()
            info = vm.session_info()
        assert [call.func_name for call in info.calls] == ["agent"] * 3
        first, second, third = engine.prompts
        assert "You know the weather." in first
        assert json.dumps(weather.json_schema) in first
        assert "no such city" in second
        assert first in second  # The chat continues its context.
        assert second in third
        assert len(engine.requests[1].fills or ()) > 0
        grammar = engine.requests[0].sampling_config.grammar
        assert grammar is not None
        assert grammar == engine.requests[1].sampling_config.grammar
        assert engine.requests[0].sampling_config.seed == 1

    def test_long_errors_are_shortened(self, vm: P.VirtualMachine, engine: FakeEngine) -> None:
        say(engine, called("weather", city="Oslo", **{"x" * 5000: 1}), "It is cold.")
        with vm.running_scope():
            (call,) = P.Agent([weather]).run("How is it?").calls
        assert call.result.startswith("Error: wrong arguments: `xxx")
        assert len(call.result) < 1100

    def test_calls_of_a_turn_and_their_results_are_bounded(
        self, vm: P.VirtualMachine, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(agent_module, "_MAX_RESULTS", 9000)

        @P.tool(max_chars=6000)
        def read(page: int) -> str:
            return f"{page}" * 5000

        say(engine, "".join(called("read", page=page) for page in range(9)), "Read.")
        with vm.running_scope():
            calls = P.Agent([read], max_calls=2).run("Read.").calls
        assert [call.arguments for call in calls] == [{"page": 0}, {"page": 1}, {}]
        assert calls[2].result == (
            "Error: InvalidRequest: 7 more calls were not made: the limit is 2 per turn"
        )
        told = engine.prompts[1]
        assert [told.count(f"{page}" * 3000 + "... (2000 more") for page in (0, 1)] == [1, 1]
        assert "7 more calls were not made" in told
        with pytest.raises(ValueError, match="max_calls"):
            P.Agent([read], max_calls=0)

    async def test_the_model_gets_an_error_for_slow_tools(
        self, vm: P.VirtualMachine, engine: FakeEngine
    ) -> None:
        cancelled, ended = asyncio.Event(), threading.Event()

        @P.tool(timeout=0.01)
        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        @P.tool(timeout=0.01)
        def block() -> None:
            ended.wait()

        @P.tool
        async def fail() -> None:
            raise TimeoutError("of its own")

        say(engine, called("wait") + called("block") + called("fail"), "Too long.")
        with vm.running_scope():
            run = await P.Agent([wait, block, fail]).arun("Wait.")
        ended.set()
        assert [call.result for call in run.calls] == [
            "Error: TimeoutError: no result in 0.01 s",
            "Error: TimeoutError: no result in 0.01 s",
            "Error: TimeoutError: of its own",
        ]
        assert cancelled.is_set()

    async def test_async_tools_run_in_parallel(
        self, vm: P.VirtualMachine, engine: FakeEngine
    ) -> None:
        together = asyncio.Barrier(2)

        @P.tool
        async def meet(who: str) -> str:
            await together.wait()
            return who

        say(engine, called("meet", who="a") + called("meet", who="b") + called("weather", city="c"))
        say(engine, "Met.", called("weather", city="Rome"), "Rome is warm.")
        agent = P.Agent([meet, weather], must_call=True)
        with vm.running_scope():
            run = await agent.arun("Meet.")
            assert (run.text, [call.result for call in run.calls][:2]) == ("Met.", ["a", "b"])
            again = agent.stream("And in Rome?", after=run)
            assert [piece async for piece in again][-1:] != []
            assert (again.text, again.num_turns, run.num_turns) == ("Rome is warm.", 2, 2)
            with pytest.raises(InvalidRequest, match="the last run of a chat"):
                await agent.arun("And in Nice?", after=run)
            with pytest.raises(TypeError, match="`meet` is async"):
                agent.run("x")
        grammars = [request.sampling_config.grammar or "" for request in engine.requests]
        assert [grammar.startswith('start: "<tool_call>"') for grammar in grammars] == [
            True,
            False,
            False,
            False,
        ]
        assert engine.prompts[0] in engine.prompts[-1]

    def test_turns_are_bounded(self, vm: P.VirtualMachine, engine: FakeEngine) -> None:
        engine.script = Script(text=lambda _: called("weather", city="Oslo"))
        with (
            vm.running_scope(),
            pytest.raises(P.MaxTurnsExceeded, match="3 turns with 3 tool calls"),
        ):
            P.Agent([weather], max_turns=3).run("x")
        assert len(engine.prompts) == 3

    def test_empty_answers_are_returned_and_failures_are_raised(
        self, vm: P.VirtualMachine, engine: FakeEngine
    ) -> None:
        say(engine, "")
        engine.script = Script(error=EngineFailed("broken"))
        agent = P.Agent(system="Be silent.")
        with vm.running_scope():
            run = agent.run("x")
            assert (run.text, run.is_done, list(run)) == ("", True, [])
            with pytest.raises(EngineFailed):
                agent.run("y")
            with pytest.raises(InvalidRequest, match="the last run of a chat"):
                agent.run("z", after=agent.stream("w"))
        with vm.running_scope(), pytest.raises(InvalidRequest, match="belongs to another session"):
            agent.run("z", after=run)
        assert engine.requests[0].sampling_config.grammar is None

    def test_two_runs_at_once_are_two_chats(self, vm: P.VirtualMachine, engine: FakeEngine) -> None:
        engine.script = Script(text=lambda prompt: f"about {prompt[-40:].split()[-1]}")
        agent = P.Agent([weather])

        async def both() -> list[P.AgentRun]:
            return await asyncio.gather(agent.arun("first"), agent.arun("second"))

        with vm.running_scope():
            assert len({run.text for run in asyncio.run(both())}) >= 1
        assert all(not ("first" in p and "second" in p) for p in engine.prompts)

    def test_invalid_agents(self) -> None:
        with pytest.raises(TypeError, match="not a tool"):
            P.Agent([test_calls_that_cannot_be_read])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="same name"):
            P.Agent([weather, weather])
        with pytest.raises(ValueError, match="max_turns"):
            P.Agent([weather], max_turns=0)
        with pytest.raises(ValueError, match="must_call"):
            P.Agent([weather], must_call=True, enforce_calls=False)
        with pytest.raises(ValueError, match="exclude each other"):
            P.Agent([weather], sampling_config=P.SamplingConfig(regex="a"))
        with pytest.raises(InvalidRequest, match="need a session"):
            P.Agent([weather]).run("x")
