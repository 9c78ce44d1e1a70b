"""An agent: a model that calls tools in each turn until it gives an answer."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from parrot.frontend.pfunc.function import SemanticFunction
from parrot.frontend.pfunc.function_body import Parameter, ParamType
from parrot.frontend.pfunc.sampling import SamplingConfig
from parrot.frontend.pfunc.semantic_variable import SemanticVariable, current_session
from parrot.frontend.pfunc.tools.tool import Tool
from parrot.frontend.pfunc.tools.turns import (
    TextFilter,
    ToolCall,
    read_calls,
    results_message,
    system_message,
    turn_grammar,
)
from parrot.protocol.errors import CallFailed, InvalidRequest

_TEMPLATE = "{{message}}{{reply}}"
_MAX_ERROR = 1000  # Characters of a tool's error that the model receives.
# Characters of all results in a turn. A tool with a larger `max_chars` raises this limit.
_MAX_RESULTS = 100_000


class MaxTurnsExceeded(CallFailed):
    """The agent called tools in each of its `max_turns` turns, and gave no answer."""


class Agent:
    """A model with tools. In each turn the model calls tools, or gives the answer. The program
    runs the tools, and the next turn tells the model their results or errors. Each turn continues
    the context of the previous turn."""

    def __init__(
        self,
        tools: Sequence[Tool[..., Any]] = (),
        system: str = "",
        *,
        max_turns: int = 10,
        max_calls: int = 32,
        must_call: bool = False,
        enforce_calls: bool = True,
        models: Sequence[str] = (),
        sampling_config: SamplingConfig | None = None,
        name: str = "agent",
    ) -> None:
        """`system`: instructions; the descriptions of the tools follow them. `max_turns`: turns of
        the model. `max_calls`: tool calls in one turn. `must_call`: the first turn must call a
        tool. `enforce_calls`: a grammar allows only well-formed calls; the engine must support
        `grammar`. Raises `TypeError` for a tool that is not a `P.Tool`, and `ValueError` for
        numbers below 1 or options that exclude each other."""
        for tool in tools:
            if not isinstance(tool, Tool):
                raise TypeError(f"{tool!r} is not a tool: decorate it with @P.tool")
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ValueError("two tools have the same name")
        if max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        if max_calls < 1:
            raise ValueError("max_calls must be at least 1")
        if must_call and not (tools and enforce_calls):
            raise ValueError("must_call needs a tool, and enforce_calls")
        self.max_turns = max_turns
        self.max_calls = max_calls
        self.max_results = max([_MAX_RESULTS, *(tool.max_chars for tool in tools)])
        self._name = name
        self._system = system_message(system, tools) or None
        self._models = tuple(models)
        self._sampling = sampling_config or SamplingConfig()
        self._turn_sampling = self._first_sampling = self._sampling
        if tools and enforce_calls:
            self._turn_sampling = self._enforcing(must_call=False)
            self._first_sampling = self._enforcing(must_call=must_call)

    def run(self, message: Any, after: "AgentRun | None" = None) -> "AgentRun":
        """Answer a message and return the finished run. `after` continues a chat: see `stream`."""
        run = self.stream(message, after)
        for _ in run:
            pass
        return run

    async def arun(self, message: Any, after: "AgentRun | None" = None) -> "AgentRun":
        """`run` for async code. The tools of a turn run in parallel, plain functions in threads."""
        run = self.stream(message, after)
        async with aclosing(aiter(run)) as pieces:
            async for _ in pieces:
                pass
        return run

    def stream(self, message: Any, after: "AgentRun | None" = None) -> "AgentRun":
        """A run that starts when it is iterated with `for` or `async for`. It yields the text of
        the model in chunks. `after`: the last run of a chat in this session, to continue the
        chat."""
        return AgentRun(self, message, after)

    def turns(self) -> tuple[SemanticFunction, SemanticFunction]:
        """The functions of a chat's first turn and of all later turns."""
        return self._turn(self._first_sampling), self._turn(self._turn_sampling)

    def _turn(self, sampling: SamplingConfig) -> SemanticFunction:
        params = [
            Parameter("message", ParamType.INPUT_LOC),
            Parameter("reply", ParamType.OUTPUT_LOC, sampling),
        ]
        made: SemanticFunction = SemanticFunction(
            self._name, params, _TEMPLATE, models=self._models
        )
        return made.with_metadata(chat=True, system=self._system)

    def _enforcing(self, *, must_call: bool) -> SamplingConfig:
        grammar = turn_grammar(list(self.tools.values()), must_call=must_call)
        return SamplingConfig(**dict(self._sampling) | {"grammar": grammar})


class AgentRun:
    """A run of an agent. Iterate it once to get the text of the model in chunks. Afterwards `text`
    is the answer (also `str(run)`), `calls` has the tool calls and their results, and `num_turns`
    is the number of turns. Iterating raises `MaxTurnsExceeded` and the errors of reads."""

    def __init__(self, agent: Agent, message: Any, after: "AgentRun | None") -> None:
        self.text = ""
        self.is_done: bool = False
        self.calls: list[ToolCall] = []
        self.num_turns = 0
        self._agent = agent
        self._message = str(message)
        self._after = after
        self._runs: list[AgentRun] = [] if after is None else after._runs  # All runs of the chat.
        self._first: SemanticFunction
        self._next: SemanticFunction
        self._first, self._next = agent.turns() if after is None else (after._next, after._next)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        names = ", ".join(call.name for call in self.calls)
        return f"<AgentRun: {self.num_turns} turns, calls [{names}], {self.text!r}>"

    def _repr_html_(self) -> str:
        """The HTML for notebooks: the answer and the tool calls."""
        from parrot.frontend.pfunc.display.shown import table_html, variable_html

        rows = [(call.name, str(dict(call.arguments)), call.result) for call in self.calls]
        table = table_html(("tool", "arguments", "result"), rows) if rows else ""
        return table + variable_html("answer", self.text if self.is_done else None)

    def __iter__(self) -> Iterator[str]:
        for tool in self._agent.tools.values():
            if tool.is_async:
                raise TypeError(f"tool `{tool.name}` is async: use `agent.arun`, or `async for`")
        while not self.is_done:
            turn = self._turn()
            var = turn.invoke_statefully(self._next, message=self._message)
            text_filter = TextFilter()
            for piece in var.stream():
                if said := text_filter.feed(piece):
                    yield said
            if rest := text_filter.finish():
                yield rest
            calls = [self._run_tool(call) for call in self._called(var)]
            self._take(var, calls)

    async def __aiter__(self) -> AsyncGenerator[str]:
        while not self.is_done:
            turn = self._turn()
            var = await turn.ainvoke_statefully(self._next, message=self._message)
            text_filter = TextFilter()
            async with aclosing(var.astream()) as pieces:
                async for piece in pieces:
                    if said := text_filter.feed(piece):
                        yield said
            if rest := text_filter.finish():
                yield rest
            calls = await asyncio.gather(*map(self._arun_tool, self._called(var)))
            self._take(var, calls)

    def _turn(self) -> SemanticFunction:
        """The function of the next turn."""
        if self.num_turns == self._agent.max_turns:
            raise MaxTurnsExceeded(
                f"no answer in {self.num_turns} turns with {len(self.calls)} tool calls"
            )
        if self.num_turns == 0:
            self._enter_chat()
        self.num_turns += 1
        return self._first if self.num_turns == 1 else self._next

    def _enter_chat(self) -> None:
        if (after := self._after) is not None:
            session = current_session.get()
            if not after.is_done or after is not self._runs[-1]:
                raise InvalidRequest(
                    "only the last run of a chat can be continued, after it has finished"
                )
            if session is None or self._next not in session.contexts:
                raise InvalidRequest("the run to continue belongs to another session")
        self._runs.append(self)

    def _called(self, var: SemanticVariable[str]) -> list[ToolCall]:
        return read_calls(str(var), self._agent.max_calls) if self._agent.tools else []

    def _take(self, var: SemanticVariable[str], calls: Sequence[ToolCall]) -> None:
        """Prepare the next turn with the results of the calls, or end with the answer."""
        if calls:
            self.calls += calls
            self._message = results_message(calls, self._agent.max_results)
        else:
            self.text, self.is_done = str(var), True

    def _run_tool(self, call: ToolCall) -> ToolCall:
        try:
            return replace(call, result=self._tool(call).run(call.arguments))
        except Exception as error:  # noqa: BLE001 - the model receives the error
            return _failed(call, error)

    async def _arun_tool(self, call: ToolCall) -> ToolCall:
        try:
            return replace(call, result=await self._tool(call).arun(call.arguments))
        except Exception as error:  # noqa: BLE001 - the model receives the error
            return _failed(call, error)

    def _tool(self, call: ToolCall) -> Tool[..., Any]:
        if call.error is not None:
            raise call.error
        tool = self._agent.tools.get(call.name)
        if tool is None:
            names = ", ".join(self._agent.tools)
            raise InvalidRequest(f"there is no tool `{call.name}`, only {names}")
        return tool


def _failed(call: ToolCall, error: Exception) -> ToolCall:
    """The call with the error, in one line, as its result."""
    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False, include_input=False)
        shown = "; ".join(f"`{'.'.join(map(str, p['loc']))}`: {p['msg']}" for p in problems[:5])
        text = f"wrong arguments: {shown}"
    else:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return replace(call, error=error, result=f"Error: {text[:_MAX_ERROR]}")
