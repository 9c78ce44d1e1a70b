"""LlamaIndex's `OpenAILike`."""

from features import CAPITAL, KEY, MODEL, URL, WEATHER, feature, raises, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def llm(**fields):
    given = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 40}
    kinds = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return OpenAILike(**given | kinds | fields)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@feature("chat")
def a_chat():
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(content=CAPITAL)]
    assert "Paris" in llm().chat(messages).message.content
    assert "Paris" in llm().complete(CAPITAL).text


@feature("stream")
def streams():
    chunks = list(llm().stream_chat([ChatMessage(content=CAPITAL)]))
    assert len(chunks) > 1
    assert "Paris" in chunks[-1].message.content


@feature("tools")
def tools():
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm().predict_and_call([tool], WEATHER)
    assert "sunny" in answer.response


@feature("completions")
def completions():
    model = llm(is_chat_model=False)
    assert model.complete(CAPITAL).text
    assert list(model.stream_complete(CAPITAL))


@feature("errors")
def errors():
    raises(Exception, lambda: llm(model="nope").complete("Hi"), "nope")


if __name__ == "__main__":
    run("llama-index-llms-openai-like")
