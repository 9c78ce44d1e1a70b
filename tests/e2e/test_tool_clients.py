"""Agents of other frameworks call a tool of the embedded model, whose template has no tool format.

The first turn requires a call, because such a small model rarely chooses a tool by itself. The
second turn gets the result, and may call or answer."""

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest

from parrot.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ASKED = "What is the weather in Paris?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
}


def client_of(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.core_url}/v1", api_key="any", max_retries=0)


def test_a_call_its_result_and_its_prefix(embedded_cluster: Cluster) -> None:
    client, asked = client_of(embedded_cluster), {"role": "user", "content": ASKED}
    given: dict[str, Any] = {"model": "embedded", "tools": [TOOL], "max_tokens": 60}
    given["temperature"] = 0
    first = client.chat.completions.create(
        messages=[asked], tool_choice="required", parallel_tool_calls=False, **given
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    history = [asked, message.model_dump(exclude_none=True), result]
    raw = client.chat.completions.with_raw_response.create(
        messages=history, **given | {"max_tokens": 12}
    )
    assert raw.headers["x-parrot-prefix"].startswith("continued")
    used, answer = first.usage, raw.parse()
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    assert answer.usage.prompt_tokens_details.cached_tokens >= used.total_tokens - 1


def test_auto_is_text_or_a_call(embedded_cluster: Cluster) -> None:
    """A sampled call matches its schema, and an answer is streamed."""
    client = client_of(embedded_cluster)
    for seed in range(3):
        stream = client.chat.completions.create(
            model="embedded",
            messages=[{"role": "user", "content": f"Call the tool `weather`. {ASKED}"}],
            tools=[TOOL],
            max_tokens=40,
            temperature=1,
            seed=seed,
            stream=True,
        )
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
        said = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert said or calls
        for call in calls:
            assert call.function is not None
            jsonschema.validate(json.loads(call.function.arguments or ""), SCHEMA)


def test_langgraphs_react_agent(embedded_cluster: Cluster) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    asked: list[tuple[str, int]] = []

    @tool
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append((city, days))
        return "Sunny."

    chat = ChatOpenAI(
        base_url=f"{embedded_cluster.core_url}/v1",
        api_key="any",
        model="embedded",
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    calling = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    answering = chat.bind_tools([weather], tool_choice="none")
    graph = StateGraph(MessagesState)
    graph.add_node("call", lambda state: {"messages": [calling.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([weather]))
    graph.add_node("answer", lambda state: {"messages": [answering.invoke(state["messages"])]})
    graph.add_edge(START, "call")
    graph.add_edge("call", "tools")
    graph.add_edge("tools", "answer")
    said = graph.compile().invoke({"messages": [("user", ASKED)]})["messages"]
    assert len(asked) == 1
    assert [message.type for message in said] == ["human", "ai", "tool", "ai"]
    assert said[-1].content


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
async def test_openais_agents(embedded_cluster: Cluster, api: str) -> None:
    import agents

    asked: list[str] = []

    def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "Sunny."

    agents.set_tracing_disabled(True)
    kind = {
        "chat_completions": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }[api]
    url = f"{embedded_cluster.core_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        agent = agents.Agent(
            name="it",
            instructions="Be brief.",
            model=kind(model="embedded", openai_client=client),
            model_settings=agents.ModelSettings(
                temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False
            ),
            tools=[agents.function_tool(weather)],
            tool_use_behavior="run_llm_again",
        )
        result = await agents.Runner.run(agent, ASKED, max_turns=4)
    assert len(asked) >= 1
    assert isinstance(result.final_output, str)


def test_anthropics_client(embedded_cluster: Cluster) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=embedded_cluster.core_url, api_key="any", max_retries=0)
    tool = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    asked = {"role": "user", "content": ASKED}
    given: dict[str, Any] = {"model": "embedded", "max_tokens": 60, "tools": [tool]}
    given["extra_body"] = {"temperature": 0}
    forced = {"type": "tool", "name": "weather"}
    first = client.messages.create(messages=[asked], tool_choice=forced, **given)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    jsonschema.validate(call.input, SCHEMA)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    said = {"role": "assistant", "content": first.content}
    history = [asked, said, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=history, **given) as stream:
        answer = stream.get_final_message()
    assert answer.content
    assert answer.usage.cache_read_input_tokens > first.usage.input_tokens


STRING = {"type": "string"}
MAIL: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"type": "array", "items": STRING}, "body": STRING},
    "required": ["to", "body"],
}
FREE: dict[str, Any] = {"mail": MAIL, "note": {"type": "object", "properties": {"text": STRING}}}
FREE_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in FREE.items()
]
MAIL_CHOICE: Any = {"type": "function", "function": {"name": "mail"}}


async def test_a_required_call_ends_within_the_limit(embedded_cluster: Cluster) -> None:
    """The model repeats itself in strings and arrays for which the schema has no length limit."""
    url = f"{embedded_cluster.core_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="embedded",
                    messages=[{"role": "user", "content": asked}],
                    tools=FREE_TOOLS,
                    tool_choice=choice,
                    max_tokens=90,
                    temperature=0,
                )
                for asked in ("Look up who wrote Moby Dick.", "Tell Anna I am ill.")
                for choice in ("required", MAIL_CHOICE)
            )
        )
    for answer in answers:
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), FREE[call.function.name])


def test_a_call_that_the_limit_cuts(embedded_cluster: Cluster) -> None:
    import anthropic

    client = client_of(embedded_cluster)
    asked = {"role": "user", "content": "Buy milk."}
    given: dict[str, Any] = {"model": "embedded", "temperature": 0}
    limit = 22
    for stream in (False, True):
        made = client.chat.completions.create(
            messages=[asked], tools=FREE_TOOLS, tool_choice=MAIL_CHOICE, max_tokens=limit,
            stream=stream, **given,
        )  # fmt: skip
        if stream:
            choices = [chunk.choices[0] for chunk in made if chunk.choices]
            (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
            said = "".join(choice.delta.content or "" for choice in choices)
        else:
            choices = made.choices
            (call,), said = choices[0].message.tool_calls, choices[0].message.content
        assert (choices[-1].finish_reason, call.function.name, said or "") == ("length", "mail", "")
        assert call.function.arguments.startswith("{")
    flat = {"type": "function", "name": "mail", "parameters": MAIL}
    response = client.responses.create(
        input="Buy milk.", tools=[flat], tool_choice="required", max_output_tokens=limit, **given
    )
    (item,) = response.output
    assert (response.status, item.type, item.status) == (
        "incomplete",
        "function_call",
        "incomplete",
    )
    vendor = anthropic.Anthropic(base_url=embedded_cluster.core_url, api_key="any", max_retries=0)
    message = vendor.messages.create(
        model="embedded",
        messages=[asked],
        max_tokens=limit,
        tools=[{"name": "mail", "input_schema": MAIL}],
        tool_choice={"type": "any"},
        extra_body={"temperature": 0},
    )
    (block,) = message.content
    assert (message.stop_reason, block.type, block.name) == ("max_tokens", "tool_use", "mail")
