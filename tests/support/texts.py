"""The text of a variable, in parts."""

from parrot.serve.graph.nodes import SemanticVariable


async def streamed(variable: SemanticVariable) -> list[str]:
    """The parts of the text that a reader receives. Raises the error of the variable."""
    parts: list[str] = []
    while (part := await variable.text_after(sum(map(len, parts)))) is not None:
        parts.append(part)
    return parts
