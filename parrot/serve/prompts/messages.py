"""Prompts as messages, for servers that apply the chat template themselves."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from parrot.serve.graph.nodes import PieceKind, SemanticVariable
from parrot.serve.prompts.segments import Segment


def chat_messages(segments: Sequence[Segment]) -> list[dict[str, str]]:
    """The messages of a chat's prompt."""
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


def with_values(
    conversation: Mapping[str, Any], inputs: Mapping[str, SemanticVariable]
) -> dict[str, Any]:
    """The conversation with the values of `inputs` in place of their marks, which are the keys."""
    pattern = re.compile("|".join(map(re.escape, inputs)))

    def filled(message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        return {**message, "content": pattern.sub(lambda mark: inputs[mark[0]].text, content)}

    return {**conversation, "messages": [filled(one) for one in conversation["messages"]]}
