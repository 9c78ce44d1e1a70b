"""The texts that a variable has one after the other."""

from parrot.serve.graph.nodes import SemanticVariable


async def streamed(variable: SemanticVariable) -> list[str]:
    """The variable's text in the parts that a reader gets. Raises the variable's error."""
    parts: list[str] = []
    while (part := await variable.text_after(sum(map(len, parts)))) is not None:
        parts.append(part)
    return parts
