"""The fields of a foreign server's answer that Parrot does not know."""

from collections.abc import Mapping
from typing import Any

from parrot.engine.openai.wire import ServerAnswer, WireAnswer, WireChoice, WireMessage

# Fields that each answer has, and that Parrot sets itself.
_OWN = frozenset({"id", "object", "created", "model", "role", "index", "total_tokens"})
_OF_ANSWER = _OWN | WireAnswer.__annotations__.keys()
_OF_CHOICE = _OWN | WireChoice.__annotations__.keys()
_OF_MESSAGE = _OWN | WireMessage.__annotations__.keys()


class AnswerExtra:
    """Collects the fields from the chunks of an answer, or from a whole answer. `message` has one
    item per chunk with such fields, because chunks of an audio answer continue each other."""

    def __init__(self) -> None:
        self._message: list[dict[str, Any]] = []
        self._found: dict[str, dict[str, Any]] = {}

    def add(self, chunk: ServerAnswer) -> None:
        fields, choice, message, _ = chunk
        if not fields.keys() <= _OF_ANSWER:
            self._keep("answer", _unknown(fields, _OF_ANSWER))
        if (usage := fields.get("usage")) is not None:
            self._keep("usage", _unknown(usage.model_extra or {}, _OWN))
        if choice is not None and not choice.keys() <= _OF_CHOICE:
            self._keep("choice", _unknown(choice, _OF_CHOICE))
        is_known = message is None or message.keys() <= _OF_MESSAGE
        if not is_known and (found := _unknown(message or {}, _OF_MESSAGE)):
            self._message.append(found)

    def _keep(self, place: str, fields: dict[str, Any]) -> None:
        if fields:
            self._found.setdefault(place, {}).update(fields)

    def fields(self) -> dict[str, Any] | None:
        """The fields by the object that contains them; None: there are none."""
        found = self._found | ({"message": self._message} if self._message else {})
        return found or None


def _unknown(part: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    return {k: v for k, v in part.items() if k not in known and v not in (None, [], "")}
