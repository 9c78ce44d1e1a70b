"""Answers that say more than text, written as text: see `conversation` of `GenerateRequest`."""

from collections.abc import Iterator

import orjson
from pydantic import BaseModel


class _Function(BaseModel):
    name: str | None = None
    arguments: str | None = None


class CallDelta(BaseModel):
    """A call of a tool, or a part of the one with this index."""

    index: int | None = None
    function: _Function = _Function()


class AnswerWriter:
    """Reasoning goes before what is said, and calls of tools behind it."""

    def __init__(self) -> None:
        self._is_reasoning = False
        self._calls: dict[int, _Function] = {}

    def add(self, reasoning: str, text: str, calls: list[CallDelta]) -> str:
        """The text of one more chunk."""
        written = ""
        if reasoning:
            written += reasoning if self._is_reasoning else f"<think>\n{reasoning}"
            self._is_reasoning = True
        if text:
            written += self._end_of_reasoning() + text
        for number, call in enumerate(calls):
            index = number if call.index is None else call.index
            known = self._calls.setdefault(index, _Function())
            known.name = known.name or call.function.name
            known.arguments = (known.arguments or "") + (call.function.arguments or "")
        return written

    def finish(self) -> str:
        """The answer has ended."""
        return self._end_of_reasoning() + "".join(self._written_calls())

    def _end_of_reasoning(self) -> str:
        was_reasoning, self._is_reasoning = self._is_reasoning, False
        return "\n</think>\n\n" if was_reasoning else ""

    def _written_calls(self) -> Iterator[str]:
        for call in self._calls.values():
            try:
                arguments = orjson.loads(call.arguments or "{}")
            except orjson.JSONDecodeError:
                arguments = call.arguments  # no call, then, but nothing is lost
            shown = orjson.dumps({"name": call.name, "arguments": arguments}).decode()
            yield f"\n<tool_call>\n{shown}\n</tool_call>"
