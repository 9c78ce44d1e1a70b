"""Which of its tools an answer may or must call, in the words of all vendors."""

from collections.abc import Sequence
from typing import Any

from parrot.gateway.prompts.call_grammars import CallRules
from parrot.gateway.vendors.openai_common import Json
from parrot.protocol.errors import InvalidRequest, UnsupportedField


def chosen_tool(choice: str | Json | None) -> str | None:
    """The one function that OpenAI's `tool_choice` names. Raises `UnsupportedField`."""
    match choice:
        case None | "auto" | "none" | "required":
            return None
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            return name
    raise UnsupportedField("such a choice of tools is not supported", param="tool_choice")


def call_rules(
    functions: Sequence[Json], *, must_call: bool, name: str | None, may_call_many: bool
) -> CallRules | None:
    """`name`: of the only function that may, and must, be called. None if there are no tools.
    Raises `InvalidRequest`."""
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise InvalidRequest(f"there is no tool `{name}`", param="tool_choice")
    if not functions:
        if must_call:
            raise InvalidRequest("`tool_choice` needs a tool to call", param="tool_choice")
        return None
    return CallRules(functions, must_call or name is not None, may_call_many and name is None)


def shown(function: dict[str, Any]) -> Json:
    """A function as the chat template shows it to the model."""
    described = {key: value for key, value in function.items() if key != "strict"}
    return {"type": "function", "function": described}
