"""A program as type checkers see it: `mypy tests/typing/program.py` finds nothing (.ci/run)."""

from typing import Annotated, assert_type

from parrot import P


@P.semantic_function()
def tell(topic: P.Input, joke: P.Output) -> None:
    """Tell a joke about {{topic}}: {{joke}}"""


@P.semantic_function(models=["m"])
def explain(
    joke: Annotated[str, P.Input],
    why: Annotated[str, P.Output(P.SamplingConfig(max_gen_length=8))],
    language: str = "English",
) -> None:
    """{{joke}} In {{language}}, this is funny since {{why}}"""


@P.native_function()
def shorten(text: Annotated[str, P.Input], short: Annotated[P.SemanticVariable, P.Output]) -> None:
    short.set(text[:10])


def main(topic: str) -> str:
    joke: P.SemanticVariable = tell(topic)
    why: P.SemanticVariable = explain(joke, language="French")
    assert_type(why.name, str)
    for piece in why.stream():
        assert_type(piece, str)
    return str(joke)


vm = P.VirtualMachine("http://localhost:9000")
if __name__ == "__main__":
    assert_type(vm.run(main, args=["parrots"], report=True), float)
