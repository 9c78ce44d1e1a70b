"""The prompt of a chat as messages."""

from collections.abc import Sequence

from parrot.serve.graph.nodes import PieceKind
from parrot.serve.prompts.segments import Segment


def chat_messages(segments: Sequence[Segment]) -> list[dict[str, str]]:
    """The messages of a chat's prompt, for a server that renders them itself."""
    messages: list[dict[str, str]] = []
    question: list[str] = []
    for segment in segments:
        if segment.kind is PieceKind.SYSTEM:
            messages.append({"role": "system", "content": segment.text})
        elif segment.kind is PieceKind.OUTPUT:
            messages.append({"role": "assistant", "content": segment.text})
        else:
            question.append(segment.text)
        if segment.ends_turn:
            messages.append({"role": "user", "content": "".join(question)})
            question = []
    return messages
