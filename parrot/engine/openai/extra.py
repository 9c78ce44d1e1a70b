"""The fields of a foreign server's answer that Parrot does not know."""

from typing import Any

from pydantic import BaseModel

from parrot.engine.openai.wire import ServerAnswer

_OWN = frozenset({"id", "object", "created", "model", "role", "index", "total_tokens"})
"""Fields that each answer has, and that Parrot sets itself."""


class AnswerExtra:
    """Collects the fields from the chunks of an answer, or from a whole answer. `message` has one
    item per chunk with such fields, because chunks of an audio answer continue each other."""

    def __init__(self) -> None:
        self._message: list[dict[str, Any]] = []
        self._found: dict[str, dict[str, Any]] = {}

    def add(self, chunk: ServerAnswer) -> None:
        choice = chunk.choices[0] if chunk.choices else None
        message = None if choice is None else choice.message or choice.delta
        for place, part in (("answer", chunk), ("usage", chunk.usage), ("choice", choice)):
            if part is not None and part.__pydantic_extra__ and (fields := _unknown(part)):
                self._found.setdefault(place, {}).update(fields)
        if message is not None and message.__pydantic_extra__ and (fields := _unknown(message)):
            self._message.append(fields)

    def fields(self) -> dict[str, Any] | None:
        """The fields by the object that contains them; None: there are none."""
        found = self._found | ({"message": self._message} if self._message else {})
        return found or None


def _unknown(part: BaseModel) -> dict[str, Any]:
    extra = part.model_extra or {}
    if extra.keys() <= _OWN:
        return {}
    return {k: v for k, v in extra.items() if k not in _OWN and v not in (None, [], "")}
