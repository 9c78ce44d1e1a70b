"""Tools for models whose chat template has no tool format. They get the format of Hermes and Qwen:

    system      ... <tools>\\n{"type": "function", ...}\\n</tools> ...
    assistant   Hm.\\n<tool_call>\\n{"name": "look", "arguments": {"at": "sky"}}\\n</tool_call>
    user        <tool_response>\\nIt is blue.\\n</tool_response>

A grammar enforces the format of calls, so models without tool training can use it too."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from parrot.protocol.call_grammar import CallMarkup

OPEN, CLOSE = "<tool_call>", "</tool_call>"
DESCRIBED = CallMarkup(OPEN, "\n", f"\n{CLOSE}", repeats=True, is_tight=True)
_EXPLAINED = """\
You can call functions. They are, with the JSON schemas of their arguments:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON, between these tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
You are then told the result. When you know enough, answer in words."""


def described(system: str, tools: Iterable[Mapping[str, Any]]) -> str:
    """The system message followed by a description of the tools. A tool has OpenAI's format:
    `{"type": "function", "function": {...}}`."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    explained = _EXPLAINED.format(tools=lines)
    return f"{system}\n\n{explained}" if system else explained


def call_text(name: str, arguments: Any) -> str:
    """A call in exactly the format that the grammar allows."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"


def results_text(results: Iterable[str]) -> str:
    """The user message after tool calls, with their results."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
