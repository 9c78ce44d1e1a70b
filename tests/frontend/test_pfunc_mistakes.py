"""Errors that are reported where the mistake is made."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parrot import P
from parrot.utils.source_place import SHORT_ERRORS


@P.semantic_function
def without_parentheses(x: P.Input, y: P.Output):
    """Say {{x}}: {{y}}"""


def test_a_decorator_without_parentheses_works() -> None:
    assert [param.name for param in without_parentheses.outputs] == ["y"]
    with pytest.raises(TypeError, match="is not a transform"):
        P.semantic_function("chat")  # type: ignore[call-overload]


def a_list(x: P.Input) -> list[str]:  # type: ignore[empty-body]
    """Names of {{x}}: {{y}}"""


def test_a_plain_return_type_is_corrected() -> None:
    with pytest.raises(ValueError, match=re.escape("write `-> P.Returns[list[str]]`")) as caught:
        P.semantic_function()(a_list)
    assert "`a_list`" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"regex": "[0-9"}, "regex `[0-9`: unterminated character set"),
        ({"regex": "(a"}, "regex `(a`: missing )"),
        ({"regex": "*a"}, "regex `*a`: nothing to repeat"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[]"}, "json_schema must be a JSON object"),
        ({"json_schema": {"type": "str"}}, "json_schema has the unknown type `str`: did you"),
        (
            {"json_schema": {"type": "object", "properties": {"n": {"type": "int"}}}},
            "json_schema has the unknown type `int`: did you mean `integer`?",
        ),
    ],
)
def test_a_broken_constraint_names_function_and_output(
    options: dict[str, Any], problem: str
) -> None:
    def count(x: P.Input, y: P.Output(**options)):  # type: ignore[valid-type]
        """{{x}} {{y}}"""

    with pytest.raises(ValueError, match=re.escape(f"`count`: output `y`: {problem}")):
        P.semantic_function()(count)


def test_only_engines_check_regular_expressions() -> None:
    def letters(x: P.Input, y: P.Output(regex=r"\p{L}+")):  # type: ignore[valid-type]
        """{{x}} {{y}}"""

    assert P.semantic_function()(letters)


def test_wrong_params_of_define_function() -> None:
    with pytest.raises(TypeError, match=r"is a list of P\.Parameter, such as"):
        P.VirtualMachine().define_function("s", "{{text}}", {"text": P.Input})  # type: ignore[arg-type]


def test_an_address_without_a_scheme() -> None:
    with pytest.raises(ValueError, match=re.escape("write `http://localhost:9000`")):
        P.VirtualMachine("localhost:9000")


@pytest.mark.parametrize("url", ["http://localhost:99999", "http://localhost:x", "http://[::1"])
def test_an_address_with_a_wrong_port_or_host(url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`{url}` is not a URL: ")):
        P.VirtualMachine(url)


def test_a_tool_with_an_incomplete_description(caplog: pytest.LogCaptureFixture) -> None:
    @P.tool
    def price(item) -> float:  # type: ignore[no-untyped-def]
        return 1.0

    assert "tool `price` has no docstring" in caplog.text
    assert "`item` without a type" in caplog.text
    caplog.clear()

    @P.tool
    def cost(item: str) -> float:
        """The price of an item."""
        return 1.0

    assert not caplog.text
    assert (price("a"), cost("a")) == (1.0, 1.0)


TYPO = r"P\.SamplingConfig: unknown field `temprature`\. Did you mean `temperature`\?"


def test_a_sampling_config_with_a_typo_names_function_and_output() -> None:
    with pytest.raises(ValueError, match=f"^semantic function `tell`: output `joke`: {TYPO}"):

        @P.semantic_function()
        def tell(
            topic: P.Input,
            joke: P.Output(P.SamplingConfig(temprature=0)),  # type: ignore[call-arg,valid-type]
        ):
            """{{topic}} {{joke}}"""

    with pytest.raises(ValueError, match=f"^{TYPO}"):
        P.SamplingConfig(temprature=0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^P\.SamplingConfig: `regex` and `choices` exclude each"):
        P.SamplingConfig(regex="a", choices=("a",))


def test_a_postponed_annotation_with_a_typo_names_function_and_output() -> None:
    def tell(topic: P.Input, joke: "P.Output(P.SamplingConfig(temprature=0))"):  # type: ignore
        """{{topic}} {{joke}}"""

    with pytest.raises(ValueError, match=f"^semantic function `tell`: output `joke`: {TYPO}"):
        P.semantic_function()(tell)


PROGRAM = """
from parrot import P

@P.semantic_function()
def tell(topic: P.Input, joke: P.Output):
    "About {{topic}}: {{joke}}"

def main():
    MISTAKE

main()
"""


@pytest.mark.parametrize(
    ("mistake", "shown"),
    [
        ("tell(subject='a')", "line 9: tell() has no parameter `subject`"),
        ("P.SamplingConfig(top_p=3)", "line 9: P.SamplingConfig: `top_p`: Input should be less"),
        ("P.VirtualMachine('localhost')", "line 9: `localhost` is not a URL"),
        (
            "P.VirtualMachine('http://localhost:1').run(lambda: tell('a').get())",
            "line 9: Unavailable: no answer from http://localhost:1",
        ),
        ("P.semantic_function('x')", "line 9: 'x' is not a transform"),
        ("P.gather([int('x')])", "Traceback (most recent call last)"),
    ],
)
def test_parrot_run_shows_a_mistake_as_one_line(mistake: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.replace("MISTAKE", mistake))
    environ = {**os.environ, SHORT_ERRORS: "1"}
    done = subprocess.run(
        [sys.executable, str(file)], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    if shown.startswith("line"):
        assert done.stderr.startswith(f"{file}, {shown}")
        assert done.stderr.count("\n") == 1
    else:
        assert done.stderr.startswith(shown)
