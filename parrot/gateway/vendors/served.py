"""Answers of servers that render conversations themselves: the fields that Parrot does not know."""

from collections.abc import Mapping, Sequence
from typing import Any

from parrot.gateway.vendors.openai_fields import Json


def add_to_choice(choice: Json, extra: Mapping[str, Any]) -> None:
    """Add the server's fields to a whole chat choice. Parrot's own fields stay."""
    message = choice["message"]
    add_missing(message, _joined(extra.get("message", ())))
    add_missing(choice, extra.get("choice", {}))
    if "reasoning_content" in message:
        message["reasoning"] = message["reasoning_content"]  # vLLM's name


def add_to_answer(answer: Json, extra: Mapping[str, Any]) -> None:
    """Add the server's fields to an answer and its usage. The usage of several choices is a sum, to
    which the server's details do not belong."""
    add_missing(answer, extra.get("answer", {}))
    if answer["usage"] is not None and len(answer["choices"]) < 2:
        add_missing(answer["usage"], extra.get("usage", {}))


def add_missing(own: Json, more: Mapping[str, Any]) -> None:
    """Add the fields that `own` does not have."""
    for name, value in more.items():
        own.setdefault(name, value)


def _joined(chunks: Sequence[Mapping[str, Any]]) -> Json:
    """The fields of all chunks together."""
    whole: Json = {}
    for chunk in chunks:
        for name, value in chunk.items():
            before = whole.get(name)
            is_list = isinstance(value, list) and isinstance(before, list)
            whole[name] = [*before, *value] if is_list and before else value
    return whole
