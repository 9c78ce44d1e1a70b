"""Functions that declare their outputs with `-> P.Returns[...]`."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel

from parrot import P
from parrot.protocol.errors import ValidationFailed
from tests.docs.obedient_engine import obedient_engine
from tests.support.machine import machine_with


class Person(BaseModel):
    name: str
    age: int


@dataclasses.dataclass
class Place:
    city: str


@pytest.fixture
def vm() -> Iterator[P.VirtualMachine]:
    """A machine whose engine generates text that satisfies the output's constraint."""
    engine = obedient_engine()
    with machine_with(engine) as vm:
        yield vm


@P.semantic_function()
def tell(topic: P.Input, style: str = "old") -> P.Returns[str]:
    """Tell a joke about {{topic}} in the style {{style}}: {{joke}}"""


@P.semantic_function()
def rate(
    joke: P.Input,
) -> Annotated[P.Returns[Literal["good", "bad"]], P.SamplingConfig(max_gen_length=3)]:
    """{{joke}} This is {{rating}}"""


@P.semantic_function()
def describe(text: P.Input) -> "P.Returns[tuple[str, Person, list[Place]]]":
    """{{text}} In short: {{summary}} Who: {{person}} Where: {{places}}"""


@P.semantic_function()
def year(text: P.Input) -> Annotated[P.Returns[str], P.Output(regex="[0-9]{4}", logprobs=2)]:
    """{{text}} It was {{when}}"""


def test_outputs_are_the_placeholders_that_are_not_parameters() -> None:
    assert [param.name for param in describe.outputs] == ["summary", "person", "places"]
    assert [param.model for param in describe.outputs] == [None, Person, list[Place]]
    (rating,) = rate.outputs
    assert rating.sampling_config == P.SamplingConfig(max_gen_length=3, choices=("good", "bad"))
    (when,) = year.outputs
    assert when.sampling_config == P.SamplingConfig(regex="[0-9]{4}", logprobs=2)
    assert tell.to_template_str().endswith("{{style}}: {{joke}}")


async def test_values_are_of_the_types(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        joke = tell("parrots", style="new")
        assert joke.get().startswith("A text")
        assert rate(joke).get() == "good"
        summary, person, places = describe(joke)
        assert await summary == summary.content
        assert await person == Person(name="a text", age=3)
        assert await places.aget() == [Place("a text")]
        assert P.gather([person]) == [person.get()]
        target: P.SemanticVariable[str] = P.variable("mine")
        year("x", when=target)  # type: ignore[call-arg]
        assert target.get() == "1843"


def test_an_invalid_value_is_rejected_when_it_is_read() -> None:
    made = P.SemanticVariable("ages", "[1, 2", model=list[int])
    with pytest.raises(ValidationFailed, match=r"`ages` is not a valid list"):
        made.get()
    assert P.SemanticVariable("ages", "[1, 2]", model=list[int]).get() == [1, 2]


def surplus(topic: P.Input) -> P.Returns[str]:
    """Tell about {{topc}}: {{joke}}"""


def nowhere(topic: P.Input) -> P.Returns[str]:
    """Tell about {{topic}}"""


def twice(topic: P.Input, joke: P.Output) -> P.Returns[str]:
    """Tell about {{topic}}: {{joke}}"""


def no_json(topic: P.Input) -> P.Returns[Callable[[], None]]:
    """Tell about {{topic}}: {{joke}}"""


def numbers(topic: P.Input) -> P.Returns[Literal[1, 2]]:
    """Tell about {{topic}}: {{joke}}"""


def contradiction(topic: P.Input) -> Annotated[P.Returns[int], P.Output(regex="[0-9]")]:
    """Tell about {{topic}}: {{joke}}"""


def options_of_many(topic: P.Input) -> Annotated[P.Returns[tuple[str, str]], P.SamplingConfig()]:
    """Tell about {{topic}}: {{joke}} {{why}}"""


def plain(topic: P.Input) -> str:
    """Tell about {{topic}}: {{joke}}"""
    return ""


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (surplus, ValueError, "it has `topc`, `joke`: did you mean `topic`?"),
        (nowhere, ValueError, "it has none"),
        (twice, ValueError, "not both"),
        (no_json, TypeError, "cannot be described by a JSON schema"),
        (numbers, TypeError, "choices that are not strings"),
        (contradiction, ValueError, "its options must not"),
        (options_of_many, ValueError, "exactly one output"),
        (plain, ValueError, "write `-> P.Returns["),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_returns_are_rejected_at_decoration(
    function: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        P.semantic_function()(function)
    assert f"`{function.__name__}`" in str(caught.value)
    with pytest.raises(ValueError, match="return annotation"):
        P.native_function()(function)


def test_the_template_s_line_is_shown() -> None:
    with pytest.raises(ValueError, match="did you mean") as caught:
        P.semantic_function()(surplus)
    assert str(caught.value).split("\n")[-1].strip() == "^^^^^^^^"
