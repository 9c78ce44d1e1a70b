"""OpenAI's agents, on chat completions and on responses."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from features import CAPITAL, IN_JSON, KEY, MODEL, URL, WEATHER, feature, raises, run
from pydantic import BaseModel

set_tracing_disabled(True)


class City(BaseModel):
    city: str


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@function_tool
def strict_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def agent(kind=OpenAIChatCompletionsModel, name=MODEL, **fields):
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    model = kind(model=name, openai_client=client)
    settings = ModelSettings(temperature=0, include_usage=True)
    return Agent(
        name="it", instructions="Be brief.", model=model, model_settings=settings, **fields
    )


def ask(asked, text):
    return asyncio.run(Runner.run(asked, text)).final_output


@feature("chat")
def a_chat():
    assert "Paris" in ask(agent(), CAPITAL)


@feature("stream")
def streams():
    async def deltas():
        result = Runner.run_streamed(agent(), CAPITAL)
        kinds = {
            e.data.type async for e in result.stream_events() if e.type == "raw_response_event"
        }
        assert "response.output_text.delta" in kinds
        return result.final_output

    assert "Paris" in asyncio.run(deltas())


@feature("tools")
def tools():
    assert "sunny" in ask(agent(tools=[get_weather]), WEATHER)


@feature("strict tools")
def strict_tools():
    assert "sunny" in ask(agent(tools=[strict_weather]), WEATHER)


@feature("structured output")
def structured():
    assert ask(agent(output_type=City), IN_JSON) == City(city="Paris")


@feature("responses")
def responses():
    assert "Paris" in ask(agent(OpenAIResponsesModel), CAPITAL)
    assert "sunny" in ask(agent(OpenAIResponsesModel, tools=[get_weather]), WEATHER)


@feature("errors")
def errors():
    raises(openai.NotFoundError, lambda: ask(agent(name="nope"), "Hi"), "nope")


if __name__ == "__main__":
    run("openai-agents")
