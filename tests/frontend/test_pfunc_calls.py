"""Binding of arguments, and the request of a call. Without a server."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from parrot import P
from parrot.frontend.pfunc.function import SemanticCall
from parrot.frontend.pfunc.metadata import FuncMetadata, NativeFuncMetadata, SemanticFuncMetadata
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.public import NativeFields, SemanticCallRequest, SemanticFields


@P.semantic_function()
def f(a: P.Input, b: P.Input, n: int, y: P.Output, z: P.Output(P.SamplingConfig(top_k=1))):
    """A {{a}} b {{b}} n {{n}} {{y}} then {{z}}"""


@P.semantic_function()
def with_default(a: P.Input, y: P.Output, n: int = 3):
    """A {{a}} {{n}} {{y}}"""


@pytest.mark.parametrize(
    ("kind", "wire"), [(SemanticFuncMetadata, SemanticFields), (NativeFuncMetadata, NativeFields)]
)
def test_options_have_the_defaults_of_requests(
    kind: type[FuncMetadata], wire: type[BaseModel]
) -> None:
    """A request contains only the options that differ from their defaults."""
    defaults = kind().model_dump(mode="json", exclude={"sep"})
    assert defaults == {name: wire.model_fields[name].default for name in defaults}
    assert kind().to_payload() == {}


def payload_of(call: SemanticCall) -> dict[str, dict[str, Any]]:
    return {p["name"]: p for p in call.to_request_payload()["parameters"]}


def test_outside_a_session_the_call_itself_is_returned() -> None:
    call = f("1", "2", 3)
    assert isinstance(call, SemanticCall)
    assert call.func is f
    payload = call.to_request_payload()
    assert payload["template"] == f.to_template_str()
    assert payload["func_name"] == "f"
    assert payload.keys() == {"func_name", "template", "parameters"}
    assert payload_of(call) == {
        "a": {"name": "a", "is_output": False, "value": "1"},
        "b": {"name": "b", "is_output": False, "value": "2"},
        "n": {"name": "n", "is_output": False, "value": "3"},
        "y": {"name": "y", "is_output": True, "sampling_config": P.SamplingConfig()},
        "z": {"name": "z", "is_output": True, "sampling_config": P.SamplingConfig(top_k=1)},
    }
    SemanticCallRequest(session_id=0, **payload)


async def test_ainvoke_outside_a_session() -> None:
    assert isinstance(await f.ainvoke("1", "2", 3), SemanticCall)


def test_positional_arguments_skip_outputs_and_keywords_bind_all() -> None:
    @P.semantic_function()
    def g(y: P.Output, a: P.Input, b: P.Input):
        """x {{y}} {{a}} {{b}}"""

    made = P.variable("made")
    call = g("1", b="2", y=made)
    assert call.bindings == {"a": "1", "b": "2", "y": made}
    assert call.output_vars == [made]


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((1, 2, 3, 4), {}, ValueError, "at most 3 positional"),
        ((1, 2, 3), {"a": 1}, TypeError, "two values for `a`"),
        ((1, 2, 3), {"q": 1}, TypeError, "no parameter `q`"),
        ((1, 2), {}, TypeError, "needs a value for `n`"),
        ((), {"b": 1, "n": 2}, TypeError, "needs a value for `a`"),
        ((1, 2, 3), {"y": "text"}, TypeError, "output `y` takes a SemanticVariable, not str"),
    ],
)
def test_wrong_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        f(*args, **kwargs)


def test_one_variable_cannot_be_two_outputs() -> None:
    made = P.variable()
    with pytest.raises(TypeError, match="the same variable for two outputs"):
        f(1, 2, 3, y=made, z=made)


def test_defaults_fill_in() -> None:
    assert with_default("x").bindings["n"] == "3"
    assert with_default("x", 5).bindings["n"] == "5"


def test_a_parameter_may_be_called_self() -> None:
    @P.semantic_function()
    def g(self: P.Input, func: P.Input, y: P.Output):
        """{{self}} {{func}} {{y}}"""

    assert g(self="1", func="2").bindings["self"] == "1"


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_values_are_never_parsed(text: str) -> None:
    """A value that looks like a placeholder stays a value, because it is not in the template."""
    call = f("{{b}}", "x", text)
    assert payload_of(call)["a"]["value"] == "{{b}}"
    assert payload_of(call)["n"]["value"] == text
    assert call.to_request_payload()["template"] == f.to_template_str()


def test_objects_are_rendered_with_str() -> None:
    assert payload_of(f(1.5, [1, "a"], None))["b"]["value"] == "[1, 'a']"
    assert payload_of(f(1.5, [1, "a"], None))["n"]["value"] == "None"


def test_a_variable_with_a_value_is_sent_as_its_value() -> None:
    known = P.variable("known", content="text")
    assert payload_of(f(known, known, known))["n"]["value"] == "text"


def test_an_unset_variable_without_a_session_cannot_be_sent() -> None:
    with pytest.raises(InvalidRequest, match="has no value") as caught:
        f(P.variable("loose"), 2, 3).to_request_payload()
    assert caught.value.param == "a"


def test_unused_inputs_are_not_sent() -> None:
    @P.semantic_function()
    def g(a: P.Input, unused: P.Input, y: P.Output):
        """{{a}} {{y}} {{unused}}"""

    assert set(payload_of(g("1", "2"))) == {"a", "y"}


def test_repr_names_the_function() -> None:
    assert "f(a: INPUT_LOC, b: INPUT_LOC" in repr(f)
    assert "SemanticCall(f" in repr(f(1, 2, 3))


def test_variables_outside_a_session() -> None:
    loose = P.variable("loose")
    assert (loose.name, loose.id, loose.content) == ("loose", None, None)
    assert not loose.is_registered
    assert not loose.is_ready
    with pytest.raises(InvalidRequest, match="belongs to no session"):
        loose.get()
    loose.set("text")
    assert loose.is_ready
    assert loose.get() == "text"
    assert list(loose.stream()) == ["text"]
    with pytest.raises(P.errors.AlreadySet):
        loose.set("other")
    assert P.variable().name != P.variable().name
    assert list(P.variable(content="").stream()) == []


async def test_async_reads_outside_a_session() -> None:
    known = P.variable("known", "text")
    assert await known.aget() == "text"
    assert [piece async for piece in known.astream()] == ["text"]
    with pytest.raises(InvalidRequest):
        await P.variable().aget()


def test_a_cancelled_variable_outside_a_session() -> None:
    loose = P.variable("loose")
    loose.cancel()
    with pytest.raises(P.errors.Cancelled):
        loose.get()
    known = P.variable("known", "text")
    known.cancel()
    assert known.get() == "text"


def test_only_text_can_be_set() -> None:
    with pytest.raises(TypeError, match="int"):
        P.variable().set(3)


@P.semantic_function(sep=" | ")
def join(parts: P.Input, parts_1: P.Input, y: P.Output):
    """All of {{parts}} and {{parts_1}}: {{y}}"""


def test_a_list_of_variables_becomes_inputs_with_a_separator_between() -> None:
    known, loose = P.variable(content="one"), P.variable(content="two")
    payload = join([known, "text", 3, loose], "x").to_request_payload()
    assert payload["template"] == (
        "All of {{parts_0}} | {{parts_1_}} | {{parts_2}} | {{parts_3}} and {{parts_1}}: {{y}}"
    )
    values = [(p["name"], p.get("value")) for p in payload["parameters"]]
    assert values == [
        ("parts_0", "one"),
        ("parts_1_", "text"),
        ("parts_2", "3"),
        ("parts_3", "two"),
        ("parts_1", "x"),
        ("y", None),
    ]
    SemanticCallRequest(session_id=0, **payload)
    payload = f((known, loose), [], 3).to_request_payload()
    assert payload["template"] == "A {{a_0}}\n{{a_1}} b {{b}} n {{n}} {{y}} then {{z}}"
    assert [p.get("value") for p in payload["parameters"]][:3] == ["one", "two", "[]"]


@pytest.mark.parametrize("wrap", [lambda v: {"x": v}, lambda v: {v}, lambda v: [[v]]])
def test_other_collections_of_variables_are_rejected(wrap: Any) -> None:
    with pytest.raises(TypeError, match=r"join\(\): `parts` takes a variable, or a list"):
        join(wrap(P.variable("v")), "x")


def test_native_functions_take_no_list_of_variables() -> None:
    @P.native_function()
    def shout(text: P.Input, loud: P.Output):
        loud.set(text.upper())

    with pytest.raises(TypeError, match="takes a variable, not a list with variables"):
        shout([P.variable("v")])


def test_a_variable_without_a_value_cannot_be_used_as_text() -> None:
    unread = P.variable("unread")
    for make_text in (str, "{}".format, lambda v: f"{v:>10}", lambda v: f"a {v}"):
        with pytest.raises(TypeError, match="`unread` has no value here yet"):
            make_text(unread)
    assert "unread" in f"{unread!r}"
    read = P.variable("read", content="text")
    assert f"{read}, {read:>6}, {str(read)!r}" == "text,   text, 'text'"


@pytest.mark.parametrize(("sep", "error"), [(3, TypeError), ("{{x}}", ValueError)])
def test_separators_are_checked(sep: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`sep`"):

        @P.semantic_function(sep=sep)
        def wrong(y: P.Output):
            """x {{y}}"""
