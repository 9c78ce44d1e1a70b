from typing import Any

import pytest

from parrot import P
from parrot.frontend.pfunc.function import PyNativeCall
from parrot.frontend.pfunc.interface import native_function
from parrot.protocol.public import NativeCallRequest

OUTSIDE = 3


@P.native_function(timeout=2, output_criteria="latency")
def add(a: P.Input, b: str, c: P.Output):
    # Comments do not travel.
    total = int(a) + int(b)
    c.set(str(total))


def test_the_source_is_sent_without_decorator_and_annotations() -> None:
    assert add.source == ("def add(a, b, c):\n    total = int(a) + int(b)\n    c.set(str(total))")


def test_the_call() -> None:
    call = add("1", 2)
    assert isinstance(call, PyNativeCall)
    payload = call.to_request_payload()
    assert payload == {
        "func_name": "add",
        "func_source": add.source,
        "timeout": 2,
        "output_criteria": P.PerformanceCriteria.LATENCY,
        "parameters": [
            {"name": "a", "is_output": False, "value": "1"},
            {"name": "b", "is_output": False, "value": "2"},
            {"name": "c", "is_output": True},
        ],
    }
    NativeCallRequest(session_id=0, **payload)
    assert add.display_signature() == "add(a: INPUT_LOC, b: INPUT_PYOBJ, c: OUTPUT_LOC)"


def test_the_source_runs_alone() -> None:
    class Out:
        text = ""

        def set(self, text: str) -> None:
            self.text = text

    out, namespace = Out(), {}
    exec(add.source, namespace)
    namespace["add"]("1", "2", out)
    assert out.text == "3"


def test_indented_nested_and_recursive_code_is_fine() -> None:
    @P.native_function()
    def count(text: P.Input, n: int = OUTSIDE, *, out: P.Output) -> None:
        import re

        def words(part: str) -> list:
            return [word for word in re.split(r"\s+", part) if word]

        out.set(f"{len(words(text))} {n!r}" if text else "0")

    assert count.source.startswith("def count(text, n, *, out):\n    import re\n")
    assert count("a b").bindings["n"] == "3"


def uses_a_global(a: P.Input, c: P.Output):
    c.set(a * OUTSIDE)


def uses_a_global_deep_inside(a: P.Input, c: P.Output):
    c.set("".join(sorted(a, key=lambda x: x * OUTSIDE)))


def uses_an_undefined_name(a: P.Input, c: P.Output):
    c.set(undefined_name)  # noqa: F821


def make_closure() -> Any:
    captured = "x"

    def uses_a_closure(a: P.Input, c: P.Output):
        c.set(captured)

    return uses_a_closure


async def is_async(a: P.Input, c: P.Output):
    c.set(a)


def is_a_generator(a: P.Input, c: P.Output):
    yield a


def has_no_output(a: P.Input):
    pass


def samples(a: P.Input, c: P.Output(P.SamplingConfig(top_k=1))):
    c.set(a)


def returns(a: P.Input, c: P.Output) -> str:
    return a


def without_source() -> Any:
    namespace: dict[str, Any] = {"P": P}
    exec("def made(a: P.Input, c: P.Output):\n    c.set(a)", namespace)
    return namespace["made"]


def a_lambda() -> Any:
    made = lambda a, c: c.set(a)  # noqa: E731
    made.__annotations__ = {"a": P.Input, "c": P.Output}
    return made


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (uses_a_global, "`OUTSIDE` from outside"),
        (uses_a_global_deep_inside, "`OUTSIDE` from outside"),
        (uses_an_undefined_name, "`undefined_name` from outside"),
        (make_closure(), "`captured` from outside"),
        (is_async, "not async"),
        (is_a_generator, "not async or `yield`"),
        (has_no_output, "no output"),
        (samples, "output `c` cannot have a sampling_config"),
        (returns, "return annotation"),
        (without_source(), "source text"),
        (a_lambda(), "made with `def`"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_that_cannot_be_sent_are_rejected_at_decoration(
    function: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        P.native_function()(function)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"timeout": uses_a_global}, TypeError),
        ({"timeout": 0}, ValueError),
        ({"timeout": 61}, ValueError),
        ({"output_criteria": "soon"}, ValueError),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        native_function(**options)
