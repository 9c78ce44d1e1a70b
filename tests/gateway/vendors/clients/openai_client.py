"""The official client of OpenAI, 2.x and 3.x."""

import asyncio
import json

import openai
from features import (
    CAPITAL,
    HANG,
    HANG_ON,
    IN_JSON,
    KEY,
    MODEL,
    THINK,
    URL,
    WEATHER,
    feature,
    raises,
    run,
    wait_until_idle,
)
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": TOOL}]


class City(BaseModel):
    city: str


def user(text):
    return [{"role": "user", "content": text}]


BRIEF = {"model": MODEL, "temperature": 0, "max_completion_tokens": 40}


def chat(messages, **fields):
    return client.chat.completions.create(**BRIEF | {"messages": messages} | fields)


@feature("models")
def models():
    (model,) = [model for model in client.models.list() if model.id == MODEL]
    assert client.models.retrieve(MODEL) == model
    assert model.created
    assert model.owned_by


@feature("chat")
def a_chat():
    messages = user(CAPITAL)
    for _ in range(3):
        answer = chat(messages)
        message = answer.choices[0].message
        assert "Paris" in message.content
        assert answer.choices[0].finish_reason == "stop"
        assert answer._request_id
        messages = [*messages, message, *user(CAPITAL)]
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    parts = [{"type": "text", "text": CAPITAL}]
    fields = {"store": False, "metadata": {"a": "b"}, "user": "me", "seed": 1, "stop": ["zzz"]}
    assert "Paris" in chat(user(parts), n=2, **fields).choices[1].message.content


@feature("stream")
def streams():
    chunks = list(chat(user(CAPITAL), stream=True, stream_options={"include_usage": True}))
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(**BRIEF, messages=user(CAPITAL)) as stream:
        assert "content.delta" in {event.type for event in stream}
        assert "Paris" in stream.get_final_completion().choices[0].message.content


@feature("async")
def asynchronous():
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as it:
            create = it.chat.completions.create
            return await asyncio.gather(
                *[create(**BRIEF, messages=user(f"{CAPITAL} {i}")) for i in range(8)]
            )

    assert all("Paris" in answer.choices[0].message.content for answer in asyncio.run(ask()))


@feature("tools")
def tools():
    answer = chat(user(WEATHER), tools=TOOLS, tool_choice="auto").choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*user(WEATHER), answer.message, result]
    assert "sunny" in chat(messages, tools=TOOLS).choices[0].message.content
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    with client.chat.completions.stream(**BRIEF, messages=user(WEATHER), **fields) as stream:
        assert "tool_calls.function.arguments.delta" in {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@feature("strict tools")
def strict_tools():
    tool = {"type": "function", "function": TOOL | {"strict": True}}
    answer = client.chat.completions.parse(**BRIEF, messages=user(WEATHER), tools=[tool])
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}


@feature("structured output")
def structured():
    answer = client.chat.completions.parse(**BRIEF, messages=user(IN_JSON), response_format=City)
    assert answer.choices[0].message.parsed == City(city="Paris")
    answer = chat(user(IN_JSON), response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"city": "Paris"}


@feature("completions")
def completions():
    answer = client.completions.create(model=MODEL, prompt=CAPITAL, temperature=0, max_tokens=9)
    assert answer.choices[0].text
    chunks = client.completions.create(model=MODEL, prompt=[CAPITAL, "And"], stream=True)
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}
    assert (
        client.completions.create(model=MODEL, prompt="Hi", echo=True).choices[0].text[:2] == "Hi"
    )


@feature("prompts of tokens")
def prompts_of_tokens():
    answer = client.completions.create(model=MODEL, prompt=[10, 11, 12], max_tokens=4)
    assert answer.usage.prompt_tokens == 3
    answer = client.completions.create(model=MODEL, prompt=[[10, 11], [12]], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens == 3
    raises(
        openai.BadRequestError,
        lambda: client.completions.create(model=MODEL, prompt=[2**30]),
        "vocabulary",
    )


@feature("best of many")
def best_of_many():
    answer = client.completions.create(model=MODEL, prompt=CAPITAL, n=2, best_of=4, max_tokens=9)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in answer.choices)


@feature("log probabilities")
def log_probabilities():
    asked = {"logprobs": True, "top_logprobs": 2}
    (choice,) = chat(user(CAPITAL), **asked).choices
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == choice.message.content.encode()
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)
    answered = []
    for chunk in chat(user(CAPITAL), stream=True, **asked):
        if chunk.choices[0].logprobs:
            answered += [entry.token for entry in chunk.choices[0].logprobs.content]
    assert answered == [entry.token for entry in entries]
    given = {"model": MODEL, "prompt": CAPITAL, "temperature": 0, "max_tokens": 9, "logprobs": 3}
    (choice,) = client.completions.create(**given).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset[0] == 0
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset)
    assert all(len(likely) in (3, 4) for likely in found.top_logprobs)
    parts = [c.choices[0].logprobs for c in client.completions.create(stream=True, **given)]
    assert [token for part in parts if part for token in part.tokens] == found.tokens
    include = ["message.output_text.logprobs"]
    brief = {"model": MODEL, "input": CAPITAL, "temperature": 0, "max_output_tokens": 40}
    answer = client.responses.create(**brief, include=include, top_logprobs=2)
    (part,) = answer.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == answer.output_text
    with client.responses.stream(**brief, include=include, top_logprobs=2) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        assert [one.token for event in deltas for one in event.logprobs] == [
            entry.token for entry in part.logprobs
        ]
        assert stream.get_final_response().output[0].content[0].logprobs == part.logprobs


@feature("responses")
def responses():
    def ask(**fields):
        given = {"model": MODEL, "temperature": 0, "max_output_tokens": 40}
        return client.responses.create(**given | fields)

    first = ask(input=CAPITAL, instructions="Be brief.")
    assert "Paris" in first.output_text
    assert first.status == "completed"
    second = ask(input=CAPITAL, previous_response_id=first.id)
    assert "Paris" in second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with client.responses.stream(model=MODEL, input=CAPITAL) as stream:
        assert "response.output_text.delta" in {event.type for event in stream}
        assert "Paris" in stream.get_final_response().output_text
    tool = {"type": "function", **TOOL, "strict": False}
    (call,) = ask(input=WEATHER, tools=[tool]).output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = ask(input=[*user(WEATHER), call, result], tools=[tool])
    assert "sunny" in answer.output_text


@feature("reasoning")
def reasoning():
    message = chat(user(THINK), reasoning_effort="low").choices[0].message
    assert (message.reasoning_content, message.content) == ("Of France, so Paris.", "Paris.")
    history = [*user(THINK), message, *user(CAPITAL)]
    assert "Paris" in chat(history).choices[0].message.content
    deltas = [chunk.choices[0].delta for chunk in chat(user(THINK), stream=True)]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "Of France, so Paris."
    given = {"model": MODEL, "input": THINK, "reasoning": {"effort": "low"}}
    first = client.responses.create(**given)
    thought, _ = first.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Of France, so Paris.")
    assert first.output_text == "Paris."
    resent = [*user(THINK), *first.output, *user(CAPITAL)]
    for fields in ({"input": resent}, {"input": CAPITAL, "previous_response_id": first.id}):
        assert "Paris" in client.responses.create(model=MODEL, **fields).output_text
    with client.responses.stream(**given) as stream:
        assert "response.reasoning_text.delta" in {event.type for event in stream}
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[0].content[0].text == "Of France, so Paris."


@feature("background responses")
def background():
    response = client.responses.create(model=MODEL, input=HANG, background=True)
    assert response.status in ("queued", "in_progress")
    assert client.responses.cancel(response.id).status == "cancelled"
    wait_until_idle()
    client.responses.delete(response.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(response.id))


@feature("errors")
def errors():
    error = raises(openai.NotFoundError, lambda: chat(user("Hi"), model="nope"), "nope")
    assert (error.code, error.param) == ("model_not_found", "model")
    raises(openai.NotFoundError, lambda: client.models.retrieve("nope"), "nope")
    raises(openai.NotFoundError, lambda: client.images.generate(prompt="x"), "/v1/images")
    error = raises(openai.BadRequestError, lambda: chat(user("Hi"), temperature=9))
    assert (error.param, error.type) == ("temperature", "invalid_request_error")
    raises(openai.BadRequestError, lambda: chat(user("Hi"), extra_body={"foo": 1}), "foo")
    raises(openai.BadRequestError, lambda: chat(user("Hi"), stream=True, top_p=7), "top_p")
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    raises(openai.BadRequestError, lambda: chat(user(image)), "image_url")
    wrong = client.with_options(api_key="wrong")
    raises(
        openai.AuthenticationError, lambda: wrong.chat.completions.create(model=MODEL, messages=[])
    )
    error = raises(openai.RateLimitError, lambda: chat(user("x" * 100_001)), "session_quota")
    assert error.response.headers["retry-after"]


@feature("embeddings")
def embeddings():
    answer = client.embeddings.create(model=MODEL, input=["Paris", "the capital of France"])
    first, second = [item.embedding for item in answer.data]
    assert len(first) == len(second) > 1
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 1
    plain = client.embeddings.create(model=MODEL, input=[5, 6, 7], encoding_format="float")
    assert len(plain.data[0].embedding) == len(first)
    several = client.embeddings.create(model=MODEL, input=[[5], [6, 7]])
    assert [item.index for item in several.data] == [0, 1]
    raises(
        openai.BadRequestError,
        lambda: client.embeddings.create(model=MODEL, input=["a", ""]),
        "input 1 is empty",
    )
    raises(
        openai.BadRequestError,
        lambda: client.embeddings.create(model=MODEL, input="a", dimensions=8),
        "dimensions",
    )


@feature("timeout")
def timeout():
    raises(openai.APITimeoutError, lambda: chat(user(HANG), timeout=0.5))
    wait_until_idle()


@feature("cancellation")
def cancellation():
    with chat(user(HANG_ON), stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    wait_until_idle()


if __name__ == "__main__":
    run("openai")
