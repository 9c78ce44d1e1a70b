"""The official client of Anthropic."""

import anthropic
from features import (
    CAPITAL,
    HANG,
    HANG_ON,
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

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def user(content):
    return {"role": "user", "content": content}


def create(*messages, **fields):
    given = {"model": MODEL, "max_tokens": 40, "messages": list(messages)}
    return client.messages.create(**given | {"extra_body": {"temperature": 0}} | fields)


@feature("models")
def models():
    (model,) = [model for model in client.models.list() if model.id == MODEL]
    assert model.display_name
    assert model.created_at.year > 2020
    assert client.models.retrieve(MODEL).id == MODEL


@feature("chat")
def chat():
    cached = {"type": "ephemeral"}
    system = [{"type": "text", "text": "You are brief.", "cache_control": cached}]
    messages = [user(CAPITAL)]
    for _ in range(3):
        answer = create(
            *messages, system=system, metadata={"user_id": "me"}, stop_sequences=["zzz"]
        )
        assert "Paris" in answer.content[0].text
        assert answer.stop_reason == "end_turn"
        assert answer._request_id
        again = [{"type": "text", "text": CAPITAL, "cache_control": cached}]
        messages += [{"role": "assistant", "content": answer.content}, user(again)]
    assert answer.usage.cache_read_input_tokens > 0
    assert answer.usage.output_tokens > 0


@feature("stream")
def streams():
    with client.messages.stream(
        model=MODEL, max_tokens=40, messages=[user(CAPITAL)], extra_body={"temperature": 0}
    ) as stream:
        assert "Paris" in "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0
    kinds = [event.type for event in create(user(CAPITAL), stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@feature("tools")
def tools():
    for choice in ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}):
        answer = create(user(WEATHER), tools=TOOLS, tool_choice=choice)
        (call,) = answer.content
        assert (answer.stop_reason, call.type, call.input) == (
            "tool_use",
            "tool_use",
            {"city": "Paris"},
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        messages = user(WEATHER), {"role": "assistant", "content": answer.content}, user([result])
        assert "sunny" in create(*messages, tools=TOOLS).content[0].text
    fields = {"max_tokens": 40, "tools": TOOLS, "messages": [user(WEATHER)]}
    with client.messages.stream(model=MODEL, **fields) as stream:
        assert stream.get_final_message().content[0].input == {"city": "Paris"}


@feature("reasoning")
def reasoning():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {"max_tokens": 2048, "thinking": thinking}
    answer = create(user(THINK), **fields)
    thought, text = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Of France, so Paris.")
    assert (text.text, bool(thought.signature)) == ("Paris.", True)
    history = user(THINK), {"role": "assistant", "content": answer.content}
    assert "Paris" in create(*history, user(CAPITAL), **fields).content[0].text
    with client.messages.stream(model=MODEL, messages=[user(THINK)], **fields) as stream:
        assert "thinking" in {event.type for event in stream}
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].signature == thought.signature


@feature("count tokens")
def count_tokens():
    few = client.messages.count_tokens(model=MODEL, messages=[user("Hi")]).input_tokens
    many = client.messages.count_tokens(model=MODEL, messages=[user("Hi")], system="x", tools=TOOLS)
    assert 0 < few < many.input_tokens


@feature("errors")
def errors():
    error = raises(anthropic.NotFoundError, lambda: create(user("Hi"), model="nope"), "nope")
    assert error.body["error"]["type"] == "not_found_error"
    raises(anthropic.NotFoundError, lambda: client.models.retrieve("nope"), "nope")
    raises(
        anthropic.BadRequestError,
        lambda: create(user("Hi"), extra_body={"temperature": 9}),
        "temperature",
    )
    raises(anthropic.BadRequestError, lambda: create(user("Hi"), extra_body={"foo": 1}), "foo")
    raises(
        anthropic.BadRequestError,
        lambda: create(user("Hi"), stream=True, extra_body={"top_p": 7}),
        "top_p",
    )
    image = [{"type": "image", "source": {"type": "url", "url": "https://x"}}]
    raises(anthropic.BadRequestError, lambda: create(user(image)), "image")
    wrong = client.with_options(api_key="wrong")
    ask = {"model": MODEL, "max_tokens": 1, "messages": [user("Hi")]}
    raises(anthropic.AuthenticationError, lambda: wrong.messages.create(**ask))
    error = raises(anthropic.RateLimitError, lambda: create(user("x" * 100_001)), "session_quota")
    assert error.response.headers["retry-after"]
    raises(anthropic.NotFoundError, lambda: client.messages.batches.list())


@feature("timeout")
def timeout():
    raises(anthropic.APITimeoutError, lambda: create(user(HANG), timeout=0.5))
    wait_until_idle()


@feature("cancellation")
def cancellation():
    with create(user(HANG_ON), stream=True) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
    wait_until_idle()


if __name__ == "__main__":
    run("anthropic")
