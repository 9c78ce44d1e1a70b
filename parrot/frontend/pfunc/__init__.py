"""PFunc, the Python front end: `from parrot import P`. See docs/python.md."""

from parrot.frontend.pfunc.annotations import Input, Output, Returns
from parrot.frontend.pfunc.function_body import Parameter, ParamType
from parrot.frontend.pfunc.interface import (
    native_function,
    semantic_function,
    variable,
)
from parrot.frontend.pfunc.many import (
    aany_of,
    aas_completed,
    afirst_k,
    agather,
    any_of,
    as_completed,
    first_k,
    gather,
)
from parrot.frontend.pfunc.mistakes import shorten_errors
from parrot.frontend.pfunc.sampling import SamplingConfig
from parrot.frontend.pfunc.semantic_variable import SemanticVariable
from parrot.frontend.pfunc.tools.agent import Agent, AgentRun, MaxTurnsExceeded
from parrot.frontend.pfunc.tools.tool import Tool, tool
from parrot.frontend.pfunc.tools.turns import ToolCall
from parrot.frontend.pfunc.transforms.conversation_template import chat_template, vicuna_template
from parrot.frontend.pfunc.transforms.prompt_formatter import (
    allowing_newline,
    standard_formatter,
)
from parrot.frontend.pfunc.vm import VirtualMachine
from parrot.protocol import errors
from parrot.protocol.fields import PerformanceCriteria

shorten_errors()

__all__ = [
    "Agent",
    "AgentRun",
    "Input",
    "MaxTurnsExceeded",
    "Output",
    "ParamType",
    "Parameter",
    "PerformanceCriteria",
    "Returns",
    "SamplingConfig",
    "SemanticVariable",
    "Tool",
    "ToolCall",
    "VirtualMachine",
    "aany_of",
    "aas_completed",
    "afirst_k",
    "agather",
    "allowing_newline",
    "any_of",
    "as_completed",
    "chat_template",
    "errors",
    "first_k",
    "gather",
    "native_function",
    "semantic_function",
    "standard_formatter",
    "tool",
    "variable",
    "vicuna_template",
]
