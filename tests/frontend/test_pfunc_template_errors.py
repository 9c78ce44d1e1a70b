"""Errors of templates show the file, the line and the wrong text."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from parrot import P
from parrot.frontend.pfunc.function_body import Parameter, ParamType


def a_wrong_name(topic: P.Input, joke: P.Output):
    """
    You are a comedian.
    Tell a joke about {{topc}}: {{joke}}
    """


def an_unknown_name(topic: P.Input, joke: P.Output):
    """Tell a joke about {{something}}: {{joke}}"""


def single_braces(topic: P.Input, joke: P.Output):
    """Tell a joke about {topic}: {{joke}}"""


def spaces(topic: P.Input, joke: P.Output):
    """Tell a joke about {{ topic }}: {{joke}}"""


def filled_twice(topic: P.Input, joke: P.Output):
    """
    Tell a joke about {{topic}}: {{joke}}
    Again: {{joke}}
    """


def adjacent(topic: P.Input, joke: P.Output, why: P.Output):
    """Tell a joke about {{topic}}: {{joke}}{{why}}"""


def output_first(topic: P.Input, joke: P.Output):
    """{{joke}} was about {{topic}}"""


def no_place(
    topic: P.Input,
    joke: P.Output,
):
    """Tell a joke about {{topic}}"""


@pytest.mark.parametrize(
    ("function", "problem", "line", "marked"),
    [
        (a_wrong_name, "`topc`: did you mean `topic`?", 3, "{{topc}}"),
        (an_unknown_name, "no parameter `something`, only `topic`, `joke`", 1, "{{something}}"),
        (single_braces, "`{topic}` is not a placeholder: write {{topic}}", 1, "{topic}"),
        (spaces, "write {{topic}}", 1, "{{ topic }}"),
        (filled_twice, "`joke` occurs twice in the template", 3, "{{joke}}"),
        (adjacent, "`joke` and `why` are adjacent", 1, "{{why}}"),
        (output_first, "`joke` is at the start of the prompt", 1, "{{joke}}"),
        (no_place, "output `joke` is not in the template: write {{joke}}", 2, "joke"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_is_shown(
    function: Callable[..., Any], problem: str, line: int, marked: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        P.semantic_function()(function)
    said, place, shown, carets = str(caught.value).split("\n")
    assert said.startswith(f"semantic function `{function.__name__}`: ")
    assert place == f'  File "{__file__}", line {function.__code__.co_firstlineno + line}'
    assert shown.strip() in inspect.getsource(function)
    assert [shown[i] for i, mark in enumerate(carets) if mark == "^"] == list(marked)


def test_a_template_without_a_file_shows_its_line() -> None:
    vm = P.VirtualMachine()
    params = [Parameter("x", ParamType.INPUT_LOC), Parameter("y", ParamType.OUTPUT_LOC)]
    with pytest.raises(ValueError, match="no parameter `z`") as caught:
        vm.define_function("f", "One\n  Two {{z}} three {{y}}", params)
    assert str(caught.value).split("\n")[1:] == [
        "  template, line 2",
        "    Two {{z}} three {{y}}",
        "        ^^^^^",
    ]
    made = vm.define_function("f", "One\nTwo {{x}} three {{y}}", params)
    with pytest.raises(TypeError, match="needs a value for `x`\n  template, line 2\n"):
        made()


def test_code_without_source_text_and_long_lines() -> None:
    scope: dict[str, Any] = {"P": P}
    text = "word " * 100
    exec(f"def f(x: P.Input, y: P.Output):\n    '''{text}{{{{z}}}} {text}{{{{y}}}}'''", scope)
    with pytest.raises(ValueError, match="no parameter `z`") as caught:
        P.semantic_function()(scope["f"])
    _, place, shown, carets = str(caught.value).split("\n")
    assert place == "  template, line 1"
    assert len(shown) <= 104
    assert shown[carets.index("^") : len(carets)] == "{{z}}"


def test_an_input_that_is_named_well_may_stand_in_other_braces_too() -> None:
    @P.semantic_function()
    def f(x: P.Input, unused: str, y: P.Output):
        """As JSON, {"x": {x}}, of {{x}}: {{y}}"""

    assert f.to_template_str() == 'As JSON, {"x": {x}}, of {{x}}: {{y}}'


@P.semantic_function(conversation_template=P.vicuna_template)
def tell(topic: P.Input, style, joke: P.Output):
    """
    Tell a joke about {{topic}},
    in the style {{style}}: {{joke}}
    """


def test_errors_of_calls_name_missing_inputs_and_their_places() -> None:
    with pytest.raises(TypeError, match=r"tell\(\) needs a value for `style`") as caught:
        tell("birds")
    _, place, shown, carets = str(caught.value).split("\n")
    assert place.startswith(f'  File "{__file__}", line ')
    assert (shown[carets.index("^") : len(carets)], shown.strip()[:8]) == ("{{style}}", "in the s")
    with pytest.raises(TypeError, match="no parameter `topc`: did you mean `topic`"):
        tell(topc="birds", style="old")
