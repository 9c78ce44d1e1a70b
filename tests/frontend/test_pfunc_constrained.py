"""Outputs with constraints on their text, and outputs that are objects."""

import asyncio
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, Field

from parrot import P
from parrot.protocol.errors import ValidationFailed
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.machine import machine_with


class Person(BaseModel):
    name: str
    age: int = Field(ge=0)


@P.semantic_function()
def describe(text: P.Input, person: P.Output(json_schema=Person)):
    """{{text}} {{person}}"""


@P.semantic_function()
def pick(
    text: P.Input,
    word: P.Output(choices=["yes", "no"]),
    number: P.Output(P.SamplingConfig(temperature=0.0), regex="[0-9]+"),
):
    """{{text}} {{word}} and {{number}}"""


@pytest.fixture
def engine() -> FakeEngine:
    return fake_engine(script=Script(text=lambda _: '{"name": "Zoë 😀", "age": 3}'))


@pytest.fixture
def vm(engine: FakeEngine) -> Iterator[P.VirtualMachine]:
    with machine_with(engine) as vm:
        yield vm


def test_a_model_class_gives_objects(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    with vm.running_scope():
        var = describe("Who?")
        person = var.get()
        assert person == Person(name="Zoë 😀", age=3)
        assert var.content == str(var) == '{"name": "Zoë 😀", "age": 3}'
        assert asyncio.run(var.aget()) == person
        assert P.gather([var]) == [person]
        mine = P.variable("mine")
        describe("Who again?", person=mine)
        assert mine.get() == person
    closed = Person.model_json_schema() | {"additionalProperties": False}
    assert engine.requests[0].sampling_config.json_schema == closed


@pytest.mark.parametrize("text", ['{"name": "x"', '{"name": "x", "age": -1}', ""])
def test_a_text_that_is_not_a_valid_object(
    vm: P.VirtualMachine, engine: FakeEngine, text: str
) -> None:
    engine.script = Script(text=lambda _: text)
    with vm.running_scope():
        var = describe("Who?")
        for _ in range(2):
            with pytest.raises(ValidationFailed, match="`person` is not a valid Person"):
                var.get()
        assert var.content == text


def test_choices_and_expressions_reach_the_engine(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    with vm.running_scope():
        word, number = pick("So?")
        assert isinstance(word.get(), str)
        number.get()
    first, second = (request.sampling_config for request in engine.requests)
    assert first.choices == ("yes", "no")
    assert (second.regex, second.temperature) == ("[0-9]+", 0.0)


def test_invalid_constraints() -> None:
    with pytest.raises(TypeError, match="cannot be described by a JSON schema"):
        P.Output(json_schema=FakeEngine)
    with pytest.raises(ValueError, match="exclude each other"):
        P.Output(choices=["a"], regex="a")
    with pytest.raises(ValueError, match="`choices`: Tuple should have at least 1"):
        P.Output(choices=[])
    config = P.SamplingConfig(max_gen_length=7)
    assert P.Output(config, grammar='start: "a"').sampling_config == P.SamplingConfig(
        max_gen_length=7, grammar='start: "a"'
    )
    assert config.grammar is None
