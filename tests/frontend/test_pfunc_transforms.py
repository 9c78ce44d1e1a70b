import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot import P
from parrot.frontend.pfunc.function import Constant, ParameterLoc, SemanticFunction
from parrot.frontend.pfunc.function_body import Parameter, ParamType
from parrot.frontend.pfunc.transforms.conversation_template import (
    ConversationTemplate,
    SeparatorStyle,
    vicuna_template,
)
from parrot.frontend.pfunc.transforms.prompt_formatter import (
    AlwaysOneSpace,
    PromptFormatter,
    PyIndentRemover,
    SquashIntoOneLine,
)

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def make(
    template: str, inputs: str = "", outputs: str = "y", **metadata: object
) -> SemanticFunction:
    params = [Parameter(name, ParamType.INPUT_LOC) for name in inputs.split()]
    params += [Parameter(name, ParamType.OUTPUT_LOC) for name in outputs.split()]
    return SemanticFunction("f", params, template, **metadata)


@pytest.mark.parametrize(
    ("formatter", "before", "after"),
    [
        (PyIndentRemover(), "a\n        b\n\tc {{y}}", "a\nb\nc {{y}}"),
        (PyIndentRemover(), "    a      b {{y}}", "a      b {{y}}"),
        (PyIndentRemover(), "a {{x}}    b\n    c {{y}}", "a {{x}}    b\nc {{y}}"),
        (SquashIntoOneLine(), "a\nb\n\nc {{y}}", "a b  c {{y}}"),
        (AlwaysOneSpace(), "a  b   c     d\n  {{y}}", "a b c d\n {{y}}"),
        (P.standard_formatter, "a\n        b  c.\n\n    d: {{y}}", "a b c. d: {{y}}"),
        (P.standard_formatter, "a {{x}}\n    b {{y}}", "a {{x}} b {{y}}"),
        (P.allowing_newline, "a\n        b  c.\n\n    d: {{y}}", "a\nb c.\n\nd: {{y}}"),
    ],
)
def test_formatters(formatter: P.standard_formatter, before: str, after: str) -> None:
    func = make(before, inputs="x")
    assert formatter.transform(func).to_template_str() == after
    assert func.to_template_str() == before


def test_the_decorator_formats_by_default_and_not_with_none() -> None:
    def f(y: P.Output):
        """One
        two:  {{y}}"""

    assert P.semantic_function()(f).to_template_str() == "One two: {{y}}"
    assert P.semantic_function(formatter=P.allowing_newline)(f).to_template_str() in (
        "One\ntwo: {{y}}",
    )
    assert P.semantic_function(formatter=None)(f).to_template_str() == f.__doc__


TEXTS = st.text(alphabet="ab \t\n.{}", min_size=1, max_size=30).filter(
    lambda text: not re.search(r"\{\s*\{|\}\s*\}", text)
)
FORMATTERS = st.sampled_from(
    [
        P.standard_formatter,
        P.allowing_newline,
        PyIndentRemover(),
        SquashIntoOneLine(),
        AlwaysOneSpace(),
    ]
)


@given(FORMATTERS, TEXTS, TEXTS, TEXTS)
def test_formatters_change_constants_only(
    formatter: P.standard_formatter, first: str, second: str, third: str
) -> None:
    func = make(f"{first}x{{{{x}}}}{second}{{{{y}}}}{third}z{{{{z}}}}", "x", "y z")
    once = formatter.transform(func)
    twice = formatter.transform(once)
    locations = [piece.param for piece in func.body if isinstance(piece, ParameterLoc)]
    assert [p.param for p in once.body if isinstance(p, ParameterLoc)] == locations
    assert twice.to_template_str() == once.to_template_str()
    assert once.metadata == func.metadata
    visible = [re.sub(r"\s", "", f.to_template_str()) for f in (func, once)]
    assert visible[0] == visible[1]


@given(TEXTS)
def test_the_standard_formatter_leaves_single_spaces_only(text: str) -> None:
    formatted = P.standard_formatter.transform(make(f"{text}a{{{{y}}}}")).to_template_str()
    assert not re.search(r"[\t\n]| {2}", formatted)


def test_a_formatter_cannot_make_a_placeholder() -> None:
    class Merger(PromptFormatter):
        def format(self, text: str, at_line_start: bool) -> str:
            return text.replace("{ {", "{{")

    with pytest.raises(ValueError, match="may change only constants"):
        Merger().transform(make("{ {x}} {{x}} {{y}}", "x"))


def test_vicuna() -> None:
    func = make(
        "This is {{a}}. An apple {{b}} a day. Show something. {{c}} And else. {{d}}", "a b", "c d"
    )
    assert vicuna_template.transform(func).to_template_str() == (
        f"{VICUNA_SYSTEM} USER: This is {{{{a}}}}. An apple {{{{b}}}} a day. Show something. "
        "ASSISTANT: {{c}}</s>USER: And else. ASSISTANT: {{d}}</s>"
    )


def test_vicuna_begins_with_an_input_and_keeps_a_tail() -> None:
    func = make("{{a}} {{c}} Bye.", "a", "c", remove_pure_fill=False)
    assert vicuna_template.transform(func).to_template_str() == (
        f"{VICUNA_SYSTEM} USER: {{{{a}}}} ASSISTANT: {{{{c}}}}</s>USER: Bye."
    )


def test_vicuna_in_the_decorator_keeps_all_else() -> None:
    @P.semantic_function(conversation_template=P.vicuna_template, models=["vicuna"])
    def f(a: P.Input, b: P.Output(P.SamplingConfig(top_k=1))):
        """Say
        {{a}} {{b}}"""

    assert f.to_template_str() == f"{VICUNA_SYSTEM} USER: Say {{{{a}}}} ASSISTANT: {{{{b}}}}</s>"
    assert f.metadata.models == ("vicuna",)
    assert f.params_map["b"].sampling_config == P.SamplingConfig(top_k=1)
    assert [piece.idx for piece in f.body] == list(range(len(f.body)))
    kinds = [isinstance(piece, Constant) for piece in f.body]
    assert kinds == [True, False, True, False, True]


def test_a_custom_template() -> None:
    template = ConversationTemplate(
        system_message="Be brief.",
        roles=["Q", "A"],
        system_template="[{system_message}]",
        seperator_style=SeparatorStyle.ADD_COLON_SINGLE,
        sep="\n",
    )
    func = template.transform(make("What? {{y}} Why? {{z}}", outputs="y z"))
    assert func.to_template_str() == "[Be brief.]\nQ: What?\nA: {{y}}\nQ: Why?\nA: {{z}}\n"


def test_chat_template_leaves_the_text_to_the_server() -> None:
    func = make("What? {{y}}")
    chat = P.chat_template.transform(func)
    assert chat.to_template_str() == func.to_template_str()
    assert chat.metadata.chat
    assert not func.metadata.chat
    brief = P.chat_template.with_system("Be brief.").transform(func)
    assert (brief.metadata.chat, brief.metadata.system) == (True, "Be brief.")
    assert chat.metadata.system is None
