"""Pydantic AI's agents, on OpenAI's chat completions and responses and on Anthropic's messages."""

import asyncio

from features import CAPITAL, IN_JSON, KEY, MODEL, THINK, URL, WEATHER, feature, raises, run
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = {"base_url": f"{URL}/v1", "api_key": KEY}


class City(BaseModel):
    city: str


def chat(name=MODEL):
    return OpenAIChatModel(name, provider=OpenAIProvider(**OPENAI))


def claude():
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=URL, api_key=KEY)
    return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@feature("chat")
def a_chat():
    for model in (chat(), claude()):
        agent = Agent(model, instructions="You are brief.")
        first = agent.run_sync(CAPITAL)
        assert "Paris" in first.output
        assert first.usage.output_tokens > 0
        second = agent.run_sync(CAPITAL, message_history=first.all_messages())
        assert "Paris" in second.output


@feature("stream")
def streams():
    async def ask(model):
        async with Agent(model).run_stream(CAPITAL) as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    for model in (chat(), claude()):
        assert "Paris" in asyncio.run(ask(model))


@feature("reasoning")
def reasoning():
    for model in (chat(), claude()):
        first = Agent(model).run_sync(THINK)
        assert first.output == "Paris."
        assert first.response.thinking == "Of France, so Paris."
        assert (
            "Paris" in Agent(model).run_sync(CAPITAL, message_history=first.all_messages()).output
        )


@feature("tools")
def tools():
    for model in (chat(), claude()):
        assert "sunny" in Agent(model, tools=[get_weather]).run_sync(WEATHER).output


@feature("structured output")
def structured():
    agent = Agent(chat(), output_type=NativeOutput(City))
    assert agent.run_sync(IN_JSON).output == City(city="Paris")


@feature("responses")
def responses():
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(**OPENAI))
    assert "Paris" in Agent(model).run_sync(CAPITAL).output
    assert "sunny" in Agent(model, tools=[get_weather]).run_sync(WEATHER).output


@feature("errors")
def errors():
    error = raises(ModelHTTPError, lambda: Agent(chat("nope")).run_sync("Hi"), "nope")
    assert error.status_code == 404


if __name__ == "__main__":
    run("pydantic-ai-slim")
