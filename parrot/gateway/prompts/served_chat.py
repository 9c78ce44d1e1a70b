"""Conversations that the server behind an engine renders itself, with the model's own template.

    {"tools": [...]}                        the options that the server gets
    {"role": "user"}                        then each message: what else it says, and its text
    Is it raining?
    {"role": "assistant"}
    <answer>

That is the prompt's text in ServeCore, which never gets to the model. Like a prompt's, its pieces
are the same exactly if the conversation is. So contexts, turns that continue others and results are
found by it as ever.

Answers come as text: reasoning between `<think>` and `</think>`, then what is said, then each call
as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, whatever the model's own markup is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from parrot.gateway.prompts.answers import AnswerParser, PlainParser, TaggedParser
from parrot.gateway.prompts.call_grammars import CallRules
from parrot.gateway.prompts.call_readers import read_json
from parrot.gateway.prompts.reasoning import ReasoningParser
from parrot.gateway.prompts.transcript import Message, Transcript
from parrot.serve.graph.nodes import PieceKind

Body = dict[str, Any]
"""The fields of a chat completion that say what was said, and what may be called."""


def served_body(
    messages: Sequence[Message], options: Mapping[str, Any], rules: CallRules | None
) -> Body:
    """The conversation as servers take it. `options` are a chat template's."""
    others = {name: value for name, value in options.items() if name != "tools"}
    body: Body = {"messages": [_served(message) for message in messages]}
    if "reasoning_effort" in others:
        body["reasoning_effort"] = others["reasoning_effort"]
    if others:
        body["chat_template_kwargs"] = others
    if rules is not None:
        strict = {function["name"] for function in rules.functions if function.get("strict")}
        body["tools"] = [_strict(tool, strict) for tool in options.get("tools", ())]
        body["tool_choice"] = _choice(rules)
        if not rules.may_call_many:
            body["parallel_tool_calls"] = False
    return body


def served_transcript(messages: Sequence[Message], body: Body) -> Transcript:
    """The stand-in for the prompt of this body."""
    begin = {name: value for name, value in body.items() if name != "messages"}
    markup, parts, ends = f"{_line(begin)}\n", list[str](), list[tuple[int, PieceKind]]()
    length = 0
    for message in (*messages, {"role": "assistant"}):
        markup += f"{_line({k: v for k, v in message.items() if k not in _SAID})}\n"
        is_answer = message.get("role") == "assistant"
        kind = PieceKind.OUTPUT if is_answer else PieceKind.VALUE
        for part, of_kind in ((markup, PieceKind.CONSTANT), (_said(message), kind)):
            if part:
                parts.append(part)
                length += len(part)
                ends.append((length, of_kind))
        markup = "\n"
    return Transcript("".join(parts), lambda start, num_known: ends)


def served_parser(rules: CallRules | None, *, may_reason: bool) -> Callable[[], AnswerParser]:
    """Makes parsers of answers."""

    def make() -> AnswerParser:
        parser: AnswerParser = PlainParser()
        if rules is not None:
            parser = TaggedParser("<tool_call>", "</tool_call>", read_json)
        return ReasoningParser(parser) if may_reason else parser

    return make


_SAID = frozenset({"content", "tool_calls", "reasoning_content"})


def _said(message: Message) -> str:
    """An answer as it came; of other messages, their text."""
    said: str = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        shown = _line({"name": function["name"], "arguments": function["arguments"]})
        said += f"\n<tool_call>\n{shown}\n</tool_call>"
    if reasoning := message.get("reasoning_content"):
        said = f"<think>\n{reasoning}\n</think>\n\n{said}"
    return said


def _served(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_served_call(call) for call in calls]}


def _served_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _line(function["arguments"])}}


def _strict(tool: Mapping[str, Any], strict: set[str]) -> Mapping[str, Any]:
    function = tool["function"]
    if function["name"] not in strict:
        return tool
    return {**tool, "function": {**function, "strict": True}}


def _choice(rules: CallRules) -> str | Mapping[str, Any]:
    if not rules.must_call:
        return "auto"
    if len(rules.functions) > 1:
        return "required"
    return {"type": "function", "function": {"name": rules.functions[0]["name"]}}


def _line(value: Any) -> str:
    return orjson.dumps(value).decode()
