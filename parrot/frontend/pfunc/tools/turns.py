"""Turns of an agent: the description of its tools, and the calls in the model's answers.

    Let me look.                                            text that users see
    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}      a call
    </tool_call>

`parrot.protocol.described_tools` defines this format."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parrot.frontend.pfunc.tools.tool import Tool, shortened
from parrot.protocol.call_grammar import CallRules, call_grammar
from parrot.protocol.described_tools import CLOSE, DESCRIBED, OPEN, described, results_text
from parrot.protocol.errors import InvalidRequest

_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model. `result`: the text that the model received. `error`: the exception
    of the tool, or the reason why the tool was not called. None: the call succeeded."""

    name: str
    arguments: Mapping[str, Any]
    result: str = ""
    error: Exception | None = None


def system_message(system: str, tools: Sequence[Tool[..., Any]]) -> str:
    """The instructions and the description of the tools."""
    return described(system, [tool.json_schema for tool in tools]) if tools else system


def turn_grammar(tools: Sequence[Tool[..., Any]], *, must_call: bool) -> str:
    """The Lark grammar of answers. It enforces the schemas of calls as far as possible. Raises
    `InvalidRequest` if the grammar is too long."""
    functions = [{"name": tool.name, "parameters": tool.parameters} for tool in tools]
    return call_grammar(DESCRIBED, CallRules(functions, must_call, may_call_many=not must_call))


def read_calls(text: str, max_calls: int) -> list[ToolCall]:
    """The first `max_calls` calls in an answer. A call that cannot be parsed has an `error` and no
    name. If there are more calls, one additional entry with an `error` stands for all of them."""
    found = _CALL.findall(text)
    calls = [_read_call(call) for call in found[:max_calls]]
    if (more := len(found) - max_calls) > 0:
        error = InvalidRequest(
            f"{more} more calls were not made: the limit is {max_calls} per turn"
        )
        calls.append(ToolCall("", {}, error=error))
    return calls


def results_message(calls: Sequence[ToolCall], max_chars: int) -> str:
    """The next turn's message, with the results of calls. If they have more than `max_chars`
    characters together, each is cut to an equal share."""
    results = [call.result for call in calls]
    if sum(map(len, results)) > max_chars:
        results = [shortened(result, max_chars // len(results)) for result in results]
    return results_text(results)


class TextFilter:
    """Filters tool calls from a streamed answer and returns the remaining text. Text that may be
    the start of a call is held back."""

    def __init__(self) -> None:
        self._held = ""
        self._is_call = False

    def feed(self, piece: str) -> str:
        """The text that is now known not to be part of a call."""
        self._held += piece
        words = ""
        while True:
            mark = CLOSE if self._is_call else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            words += "" if self._is_call else before
            self._held, self._is_call = after, not self._is_call
        end = len(self._held) - _common_end(self._held, mark)
        if not self._is_call:
            words += self._held[:end]
        self._held = self._held[end:]
        return words

    def finish(self) -> str:
        """The rest of the text after the end of the answer."""
        return "" if self._is_call else self._held


def _common_end(text: str, mark: str) -> int:
    """The length of the longest suffix of the text that is a prefix of the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _read_call(text: str) -> ToolCall:
    text = text.strip()
    try:
        call, end = json.JSONDecoder().raw_decode(text)
        if not CLOSE.startswith(text[end:].strip()):  # The answer may be cut inside CLOSE.
            raise ValueError(f"more follows: {text[end:][:80]!r}")
    except (ValueError, RecursionError) as error:
        return _unreadable(f"it is not JSON, or was cut: {error}")
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
    return _unreadable("it needs a name, and arguments that are an object")


def _unreadable(problem: str) -> ToolCall:
    return ToolCall("", {}, error=InvalidRequest(f"the call cannot be read: {problem}"))
