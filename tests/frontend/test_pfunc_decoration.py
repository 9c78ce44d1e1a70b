"""The result of decorating a semantic function, and the errors at decoration."""

import inspect
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot import P
from parrot.frontend.pfunc.function import Constant, ParameterLoc, SemanticFunction
from parrot.frontend.pfunc.function_body import Parameter, ParamType


def test_a_docstring_becomes_a_body() -> None:
    @P.semantic_function()
    def joke(topic: P.Input, style: str, joke: P.Output, why: P.Output):
        """Tell a {{style}} joke about {{topic}}: {{joke}} Explain it: {{why}}. The end."""

    assert joke.name == "joke"
    assert [param.name for param in joke.params] == ["topic", "style", "joke", "why"]
    assert [param.name for param in joke.inputs] == ["topic", "style"]
    assert [param.name for param in joke.outputs] == ["joke", "why"]
    assert joke.params_map["style"].typ is P.ParamType.INPUT_PYOBJ
    assert [type(piece) for piece in joke.body] == [Constant, ParameterLoc] * 4
    assert [piece.idx for piece in joke.body] == list(range(8))
    outputs = [p.param.is_output for p in joke.body if isinstance(p, ParameterLoc)]
    assert outputs == [False, False, True, True]
    assert joke.to_template_str() == (
        "Tell a {{style}} joke about {{topic}}: {{joke}} Explain it: {{why}}"
    )


def test_help_shows_the_decorated_function() -> None:
    @P.semantic_function()
    def joke(topic: P.Input, joke: P.Output):
        """Tell a joke about {{topic}}: {{joke}}"""

    @P.native_function()
    def loud(text: P.Input, out: P.Output):
        """Make it loud."""
        out.set(text.upper())

    for func, names in ((joke, ["topic", "joke"]), (loud, ["text", "out"])):
        assert list(inspect.signature(func).parameters) == names
        assert func.__name__ == func.name
    assert (joke.__doc__, loud.__doc__) == (
        "Tell a joke about {{topic}}: {{joke}}",
        "Make it loud.",
    )


def test_annotations_for_type_checkers() -> None:
    sampling = P.SamplingConfig(max_gen_length=3)

    @P.semantic_function()
    def joke(
        topic: Annotated[str, P.Input],
        style: Annotated[str, "anything"],
        joke: Annotated[str, "anything", P.Output(sampling)],
        why: Annotated[str, P.Output],
    ) -> None:
        """Tell a {{style}} joke about {{topic}}: {{joke}} Explain it: {{why}}"""

    kinds = [param.typ for param in joke.params]
    assert kinds[:2] == [P.ParamType.INPUT_LOC, P.ParamType.INPUT_PYOBJ]
    assert [param.name for param in joke.outputs] == ["joke", "why"]
    assert joke.outputs[0].sampling_config == sampling


def test_text_after_the_last_output_can_be_kept() -> None:
    @P.semantic_function(remove_pure_fill=False)
    def joke(topic: P.Input, joke: P.Output):
        """About {{topic}}: {{joke}} The end."""

    assert joke.to_template_str().endswith("{{joke}} The end.")


def test_a_function_without_outputs_keeps_its_text() -> None:
    @P.semantic_function()
    def start(name: P.Input):
        """You are {{name}}."""

    assert start.to_template_str() == "You are {{name}}."


def test_outputs_have_their_sampling_config() -> None:
    config = P.SamplingConfig(temperature=0, stop_str=["a", "b"], max_gen_length=3)

    @P.semantic_function()
    def f(plain: P.Output, tuned: P.Output(config)):
        """One {{plain}} two {{tuned}}"""

    assert f.params_map["plain"].sampling_config == P.SamplingConfig()
    assert f.params_map["tuned"].sampling_config == config


def test_metadata() -> None:
    @P.semantic_function(
        models=["a", "b"],
        model_type="text",
        cache_prefix=False,
        output_criteria="TTFT",
        fuse_fill=True,
        try_register=False,
    )
    def f(y: P.Output):
        """x {{y}}"""

    assert f.metadata.models == ("a", "b")
    assert f.metadata.model_type == "text"
    assert f.metadata.remove_pure_fill
    assert not f.metadata.cache_prefix
    assert f.metadata.output_criteria is P.PerformanceCriteria.TTFT
    assert f.metadata.fuse_fill
    assert not f.metadata.chat


def returns_something(x: P.Input, y: P.Output) -> str:
    """{{x}} {{y}}"""
    return ""


def two_roles(x: P.Input, y: Annotated[str, P.Output, P.Output()]):
    """{{x}} {{y}}"""


def no_docstring(x: P.Input, y: P.Output): ...


def unknown_placeholder(x: P.Input, y: P.Output):
    """{{x}} {{z}} {{y}}"""


def adjacent_outputs(x: P.Input, y: P.Output, z: P.Output):
    """{{x}} {{y}}{{z}}"""


def filled_twice(x: P.Input, y: P.Output):
    """{{x}} {{y}} and {{y}}"""


def output_first(x: P.Input, y: P.Output):
    """{{y}} {{x}}"""


def output_nowhere(x: P.Input, y: P.Output):
    """{{x}}"""


def any_arguments(*args: P.Input, y: P.Output):
    """x {{y}}"""


def any_keywords(y: P.Output, **kwargs: Any):
    """x {{y}}"""


def positional_only(x: P.Input, /, y: P.Output):
    """{{x}} {{y}}"""


def default_of_an_output(x: P.Input, y: P.Output = "y"):
    """{{x}} {{y}}"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returns_something, "write `-> P.Returns"),
        (two_roles, "`y` is annotated with 2 roles"),
        (no_docstring, "no docstring"),
        (unknown_placeholder, "`z`"),
        (adjacent_outputs, "`y` and `z` are adjacent"),
        (filled_twice, "`y` occurs twice"),
        (output_first, "`y` is at the start of the prompt"),
        (output_nowhere, "`y` is not in the template"),
        (any_arguments, "args"),
        (any_keywords, "kwargs"),
        (positional_only, "`x`|x:"),
        (default_of_an_output, "`y` cannot have a default"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_functions_are_rejected_at_decoration(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        P.semantic_function()(function)


def good(x: P.Input, y: P.Output):
    """{{x}} {{y}}"""


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 1.0}, TypeError, "temperature"),
        ({"chat": True}, TypeError, "chat"),
        ({"models": "vicuna"}, TypeError, "models"),
        ({"models": [1]}, TypeError, "models"),
        ({"model_type": "bytes"}, ValueError, "model_type"),
        ({"remove_pure_fill": "no"}, TypeError, "remove_pure_fill"),
        ({"cache_prefix": 1}, TypeError, "cache_prefix"),
        ({"output_criteria": "soon"}, ValueError, "latency, throughput, TTFT, TPOT"),
        ({"formatter": "none"}, TypeError, "transform"),
    ],
)
def test_wrong_options_are_rejected_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        P.semantic_function(**options)(good)


def test_output_takes_only_a_sampling_config() -> None:
    with pytest.raises(TypeError, match="SamplingConfig"):
        P.Output(0.5)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Parameter("not a name", ParamType.INPUT_LOC), ValueError),
        (lambda: Parameter("x", "input"), TypeError),
        (lambda: Parameter("x", ParamType.INPUT_LOC, P.SamplingConfig()), ValueError),
        (
            lambda: SemanticFunction("f", [Parameter("x", ParamType.INPUT_LOC)] * 2, "{{x}}"),
            ValueError,
        ),
    ],
)
def test_wrong_parameters_are_rejected(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_annotations_may_be_postponed() -> None:
    def f(x: "P.Input", n: "int", unknown: "NoSuchType", y: "P.Output(P.SamplingConfig(top_k=3))"):  # noqa: F821
        """{{x}} {{n}} {{unknown}} {{y}}"""

    func = P.semantic_function()(f)
    assert [param.typ.name for param in func.params] == [
        "INPUT_LOC",
        "INPUT_PYOBJ",
        "INPUT_PYOBJ",
        "OUTPUT_LOC",
    ]
    assert func.params_map["y"].sampling_config == P.SamplingConfig(top_k=3)


def test_a_postponed_role_that_cannot_be_evaluated_is_rejected() -> None:
    def f(x: "Q.Input", y: "P.Output"):  # noqa: F821
        """{{x}} {{y}}"""

    with pytest.raises(ValueError, match=r"Q\.Input"):
        P.semantic_function()(f)


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
# Without braces, because a text such as `{{A}}` is a placeholder.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="{"), min_size=1, max_size=20)


@given(st.lists(st.tuples(TEXTS, NAMES, st.booleans()), unique_by=lambda item: item[1]), TEXTS)
def test_bodies_are_parsed_without_loss(items: list[tuple[str, str, bool]], tail: str) -> None:
    template = "".join(f"{text}{{{{{name}}}}}" for text, name, _ in items) + tail
    params = [
        Parameter(name, ParamType.OUTPUT_LOC if is_output else ParamType.INPUT_LOC)
        for _, name, is_output in items
    ]
    func = SemanticFunction("f", params, template, remove_pure_fill=False)
    assert func.to_template_str() == template
    names = [piece.param.name for piece in func.body if isinstance(piece, ParameterLoc)]
    assert names == [name for _, name, _ in items]
    pruned = SemanticFunction("f", params, template)
    assert template.startswith(pruned.to_template_str())
    if pruned.outputs:
        assert pruned.body[-1] == ParameterLoc(len(pruned.body) - 1, pruned.outputs[-1])
