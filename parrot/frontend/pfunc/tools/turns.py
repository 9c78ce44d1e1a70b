"""Turns of an agent: how tools are shown to a model, and how its answers call them.

    Let me look.                                            text, which people are shown
    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}      a call
    </tool_call>

The form is that of `parrot.protocol.described_tools`."""

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
    """The instructions, and what the model is told of its tools."""
    return described(system, [tool.json_schema for tool in tools]) if tools else system


def turn_grammar(tools: Sequence[Tool[..., Any]], *, must_call: bool) -> str:
    """The grammar (Lark) of answers, whose calls fit the schemas as far as they can be enforced.
    Raises `InvalidRequest` if it is too long."""
    functions = [{"name": tool.name, "parameters": tool.parameters} for tool in tools]
    return call_grammar(DESCRIBED, CallRules(functions, must_call, may_call_many=not must_call))


def read_calls(text: str, max_calls: int) -> list[ToolCall]:
    """The first calls in an answer. One that cannot be read has the `error` that says so, and no
    name; so has one more, which stands for all further ones."""
    found = _CALL.findall(text)
    calls = [_read_call(call) for call in found[:max_calls]]
    if (more := len(found) - max_calls) > 0:
        error = InvalidRequest(f"{more} more calls were not made: {max_calls} in a turn at most")
        calls.append(ToolCall("", {}, error=error))
    return calls


def results_message(calls: Sequence[ToolCall], max_chars: int) -> str:
    """The next turn's message, of the results of calls. Together they have `max_chars` at most, or
    each is cut to an equal share of that."""
    results = [call.result for call in calls]
    if sum(map(len, results)) > max_chars:
        results = [shortened(result, max_chars // len(results)) for result in results]
    return results_text(results)


class Words:
    """Takes an answer as it grows, and gives what of it are words: neither calls nor what may be
    the beginning of one."""

    def __init__(self) -> None:
        self._held = ""
        self._is_call = False

    def feed(self, piece: str) -> str:
        """The words that are certain now."""
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
        """The rest, when the answer has ended."""
        return "" if self._is_call else self._held


def _common_end(text: str, mark: str) -> int:
    """The length of the longest end of the text that begins the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _read_call(text: str) -> ToolCall:
    text = text.strip()
    try:
        call, end = json.JSONDecoder().raw_decode(text)
        if not CLOSE.startswith(text[end:].strip()):  # which is where it may have been cut
            raise ValueError(f"more follows: {text[end:][:80]!r}")
    except (ValueError, RecursionError) as error:
        return _unreadable(f"it is not JSON, or was cut: {error}")
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
    return _unreadable("it needs a name, and arguments that are an object")


def _unreadable(problem: str) -> ToolCall:
    return ToolCall("", {}, error=InvalidRequest(f"the call cannot be read: {problem}"))
