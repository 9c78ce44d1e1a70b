"""Tools for models whose chat template has no tool format. The form is that of Hermes and Qwen:

    system      ... <tools>\\n{"type": "function", ...}\\n</tools> ...
    assistant   Hm.\\n<tool_call>\\n{"name": "look", "arguments": {"at": "sky"}}\\n</tool_call>
    user        <tool_response>\\nIt is blue.\\n</tool_response>

Models that were never trained to call tools follow it as well, since a grammar lets calls have no
other form."""

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
    """The system message, and what the model is told of its tools. A tool has OpenAI's form:
    `{"type": "function", "function": {...}}`."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    explained = _EXPLAINED.format(tools=lines)
    return f"{system}\n\n{explained}" if system else explained


def call_text(name: str, arguments: Any) -> str:
    """A call exactly as the grammar lets a model write it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"


def results_text(results: Iterable[str]) -> str:
    """The user's message after calls, which tells the model their results."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
