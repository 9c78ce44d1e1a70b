"""Shows conversations with tools to a chat template that has no tool format.

    sent                                          shown
    (tools)                                       system: ... <tools> ... </tools> ...
    user: Is it raining in Paris?                 user: Is it raining in Paris?
    assistant, tool call weather(city=Paris)      assistant: <tool_call> ... </tool_call>
    tool: It rains.                               user: <tool_response> It rains. </tool_response>

A call is shown exactly as the model's grammar generates it. So the prompt of the next turn starts
with the whole previous turn, and its KV is reused."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parrot.protocol.described_tools import call_text, described, results_text

Message = Mapping[str, Any]
_CALLS = frozenset({"tool_calls", "tool_call_id", "name"})


class DescribedMessages(NamedTuple):
    """Messages with tools as text."""

    messages: list[Message]
    are_as_sent: bool  # each message corresponds to the sent message with the same index


def describe(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> DescribedMessages:
    """The messages, with tools, calls and results as text. If the template has no system message
    (`takes_system`), the first user message describes the tools."""
    shown: list[Message] = []
    results: list[str] = []  # results of the last answer's calls, and the user messages after them
    for message in messages:
        if message.get("role") == "tool":
            results.append(results_text([_text(message)]))
            continue
        if results and message.get("role") == "user":
            results.append(f"\n{_text(message)}")
            continue
        _append(shown, results)
        shown.append(_with_calls(message) if message.get("tool_calls") else message)
    _append(shown, results)
    are_as_sent = len(shown) == len(messages)
    if tools:
        are_as_sent &= not _add_description(shown, tools, "system" if takes_system else "user")
    return DescribedMessages(shown, are_as_sent)


def _append(shown: list[Message], results: list[str]) -> None:
    if results:
        shown.append({"role": "user", "content": "\n".join(results)})
        results.clear()


def _with_calls(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [call_text(function["name"], function["arguments"]) for function in functions]
    said = [text] if (text := _text(message)) else []
    kept = {key: value for key, value in message.items() if key not in _CALLS}
    return {**kept, "content": "\n".join([*said, *calls])}


def _add_description(shown: list[Message], tools: Sequence[Mapping[str, Any]], role: str) -> bool:
    """Describe the tools in the first message with this role, or in a new one. Returns whether a
    new message was added."""
    first = next((i for i, message in enumerate(shown) if message.get("role") == role), None)
    if role == "system" and first:
        first = None  # A later system message refers to the messages before it.
    if first is None:
        shown.insert(0, {"role": role, "content": described("", tools)})
        return True
    text = _text(shown[first])
    content = described(text, tools) if role == "system" else f"{described('', tools)}\n\n{text}"
    shown[first] = {**shown[first], "content": content}
    return False


def _text(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
