"""LangChain's models for OpenAI and Anthropic."""

from features import CAPITAL, IN_JSON, KEY, MODEL, URL, WEATHER, feature, raises, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

ACCESS = {"model": MODEL, "api_key": KEY, "max_retries": 0}
chat = ChatOpenAI(base_url=f"{URL}/v1", temperature=0, max_tokens=40, **ACCESS)
claude = ChatAnthropic(base_url=URL, max_tokens=40, model_kwargs={"temperature": 0}, **ACCESS)


class City(BaseModel):
    city: str


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}"


@feature("chat")
def a_chat():
    messages = [SystemMessage("You are brief."), HumanMessage(CAPITAL)]
    for model in (chat, claude):
        answer = model.invoke(messages)
        assert "Paris" in answer.text
        assert answer.usage_metadata["output_tokens"] > 0
        assert "Paris" in model.invoke([*messages, answer, HumanMessage(CAPITAL)]).text
    assert all("Paris" in answer.text for answer in chat.batch([CAPITAL] * 4))


@feature("stream")
def streams():
    for model in (chat, claude):
        chunks = list(model.stream(CAPITAL))
        assert len(chunks) > 1
        assert "Paris" in "".join(chunk.text for chunk in chunks)
    chunks = chat.stream(CAPITAL, stream_usage=True)
    assert any(chunk.usage_metadata for chunk in chunks)


@feature("tools")
def tools():
    for model in (chat, claude):
        bound = model.bind_tools([get_weather])
        asked = HumanMessage(WEATHER)
        called = bound.invoke([asked])
        (call,) = called.tool_calls
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        assert "sunny" in bound.invoke([asked, called, result]).text
        streamed = None
        for chunk in bound.stream([asked]):
            streamed = chunk if streamed is None else streamed + chunk
        assert streamed.tool_calls[0]["args"] == {"city": "Paris"}


@feature("structured output")
def structured():
    for method in ("json_schema", "json_mode"):
        model = chat.with_structured_output(City, method=method)
        assert model.invoke(IN_JSON) == City(city="Paris")


@feature("completions")
def completions():
    model = OpenAI(base_url=f"{URL}/v1", max_tokens=9, temperature=0, **ACCESS)
    assert model.invoke(CAPITAL)
    assert "".join(model.stream(CAPITAL))


@feature("responses")
def responses():
    model = ChatOpenAI(
        base_url=f"{URL}/v1", use_responses_api=True, temperature=0, max_tokens=40, **ACCESS
    )
    assert "Paris" in model.invoke(CAPITAL).text
    assert "Paris" in "".join(chunk.text for chunk in model.stream(CAPITAL))
    (call,) = model.bind_tools([get_weather]).invoke(WEATHER).tool_calls
    assert call["args"] == {"city": "Paris"}


@feature("log probabilities")
def log_probabilities():
    model = chat.bind(logprobs=True, top_logprobs=2)
    answer = model.invoke(CAPITAL)
    answered = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in answered) == answer.text
    assert all(len(entry["top_logprobs"]) == 2 for entry in answered)
    whole = None
    for chunk in model.stream(CAPITAL):
        whole = chunk if whole is None else whole + chunk
    streamed = whole.response_metadata["logprobs"]["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in answered]
    completing = OpenAI(base_url=f"{URL}/v1", max_tokens=9, temperature=0, logprobs=2, **ACCESS)
    ((generation,),) = completing.generate([CAPITAL]).generations
    assert "".join(generation.generation_info["logprobs"]["tokens"]) == generation.text


@feature("errors")
def errors():
    wrong = ChatOpenAI(base_url=f"{URL}/v1", **ACCESS | {"model": "nope"})
    raises(Exception, lambda: wrong.invoke("Hi"), "nope")
    wrong = ChatAnthropic(base_url=URL, **ACCESS | {"model": "nope"})
    raises(Exception, lambda: wrong.invoke("Hi"), "nope")


if __name__ == "__main__":
    run("langchain-openai", "langchain-anthropic")
