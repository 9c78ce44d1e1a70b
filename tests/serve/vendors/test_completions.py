"""OpenAI's completions of plain text."""

from typing import Any

import pytest

from parrot.protocol.errors import PromptTooLong
from tests.serve.vendors.conftest import MODEL, Site, payloads
from tests.support.fake_engine import Script

PATH = "/v1/completions"


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt} | fields


async def test_a_completion(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: " time")
    answer = await site.post(PATH, body("Once upon a"))
    assert site.engine.prompts == ["Once upon a"]
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" time", "stop")
    assert site.engine.requests[0].sampling_config.max_gen_length == 16
    assert answer["usage"]["prompt_tokens"] == len("Once upon a")


async def test_special_tokens_of_a_prompt_are_special(site: Site) -> None:
    prompt = "<|im_start|>user\nHi"
    answer = await site.post(PATH, body(prompt))
    assert answer["usage"]["prompt_tokens"] == 1 + len("user\nHi")


async def test_many_prompts_with_choices_and_their_echo(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: prompt.upper())
    for stream in (False, True):
        fields = {"n": 2, "echo": True, "stream_options": {"include_usage": True}}
        asked = body(["ab", "cde"], stream=stream, **fields)
        texts = [""] * 4
        if stream:
            *chunks, last = payloads(await site.stream(PATH, asked))
            usage = last["usage"]
            for chunk in chunks:
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        else:
            answer = await site.post(PATH, asked)
            usage = answer["usage"]
            texts = [choice["text"] for choice in answer["choices"]]
        assert texts == ["abAB", "abAB", "cdeCDE", "cdeCDE"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 14)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 9}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
    ],
)
async def test_what_is_not_supported_is_named(
    site: Site, fields: dict[str, Any], param: str
) -> None:
    status, answer = await site.send(PATH, body("Hi") | fields)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_one_prompt_that_fails_fails_the_request(site: Site) -> None:
    site.engine.scripts = [Script(), Script(error=PromptTooLong("too long"))]
    status, answer = await site.send(PATH, body(["a", "b"]))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
