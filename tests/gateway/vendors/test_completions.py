"""OpenAI's completions of plain text."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from parrot.protocol.errors import PromptTooLong
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, payloads, serve
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.fake_engine import Script, fake_engine

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
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, 2**20]}, "prompt"),
        ({"prompt": [[1], [2**20]]}, "prompt"),
        ({"prompt": [1], "stream": True, "prompt_cache_key": "x", "suffix": "x"}, "suffix"),
        ({"prompt": [2**20], "stream": True}, "prompt"),
        ({"prompt": [1], "prompt_cache_key": "x", "parrot": {"defer": True}}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 3, "prompt_cache_key": "x", "parrot": {"defer": True}}, "best_of"),
        ({"logprobs": 9}, "logprobs"),
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


@pytest.mark.parametrize(
    "prompt", [[-1], [1, "a"], ["a", 1], [[1], "a"], [[1], 1], [1.5], [True, "a"]]
)
async def test_prompts_that_are_neither_texts_nor_tokens(site: Site, prompt: Any) -> None:
    status, answer = await site.send(PATH, body(prompt))
    assert status == 400
    assert answer["error"]["param"].startswith("prompt")


def ids_of(text: str) -> list[int]:
    return list(Tokenizer.from_str(byte_tokenizer().tokenizer_json).encode(text).ids)


def filled(site: Site) -> list[list[int]]:
    """Return the prompt tokens of each request's context."""
    return [
        [i for piece in request.fills for i in piece.token_ids or ()]
        for request in site.engine.requests
    ]


async def test_the_engine_gets_the_tokens_of_a_prompt_unchanged(site: Site) -> None:
    """Tokenizing their text would give other tokens: the prompt has a character in two tokens, a
    special token, and a part of a character."""
    ids = [*ids_of("a<|im_start|>b"), ids_of("é")[0]]
    answer = await site.post(PATH, body(ids, logprobs=0))
    assert filled(site) == [ids]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    chunks = payloads(
        await site.stream(PATH, body(ids, stream=True, stream_options={"include_usage": True}))
    )
    assert chunks[-1]["usage"]["prompt_tokens"] == len(ids)
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == answer["choices"][0]["text"]
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1


async def test_many_prompts_of_tokens(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: prompt.upper())
    answer = await site.post(PATH, body([ids_of("ab"), ids_of("cde")], echo=True))
    assert [choice["text"] for choice in answer["choices"]] == ["abAB", "cdeCDE"]


async def test_tokens_share_the_prefix_of_the_same_text(site: Site) -> None:
    text = "a text that is longer than a block or two"
    await site.post(PATH, body(text))
    for prompt in (ids_of(text), text):
        usage = (await site.post(PATH, body(prompt)))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(ids_of(text)) - 1


async def test_tokens_do_not_share_the_prefix_of_a_different_text() -> None:
    """For token prompts, no BOS token is added."""
    engine = fake_engine("e0", model=MODEL, add_bos=True)
    async with serve(CoreConfig(), engine) as site:
        text = "abcabcabc"
        ids = ids_of(text)
        await site.post(PATH, body(text))
        answer = await site.post(PATH, body(ids))
        assert filled(site)[1] == ids
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        bos = filled(site)[0][0]
        shared = await site.post(PATH, body([bos, *ids]))
        assert shared["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids)


async def test_engines_of_text_reject_tokens() -> None:
    async with serve(CoreConfig(), fake_engine("e0", model=MODEL, text=True)) as site:
        status, answer = await site.send(PATH, body([1, 2]))
        assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_the_best_of_many(site: Site) -> None:
    """In this engine, the log probability of a byte is -(byte % 8) / 8."""
    texts = ["g", "ah", "h", "", "bb", "hhhc"]
    site.engine.scripts = [Script(text=lambda _, t=text: t) for text in texts]
    answer = await site.post(PATH, body("x", n=3, best_of=6))
    assert [choice["text"] for choice in answer["choices"]] == ["h", "ah", "hhhc"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)
    assert answer["usage"]["prompt_tokens"] == 1


async def test_the_best_of_each_prompt_with_its_numbers(site: Site) -> None:
    texts = ["b", "a", "c", "d"]
    site.engine.scripts = [Script(text=lambda _, t=text: t) for text in texts]
    asked = body(["x", "y"], best_of=2, logprobs=1, echo=False, seed=5)
    answer = await site.post(PATH, asked)
    assert [choice["text"] for choice in answer["choices"]] == ["a", "c"]
    assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [["a"], ["c"]]
    assert {r.sampling_config.seed for r in site.engine.requests} == {5, 6}


async def test_a_stream_with_best_of_equal_to_n(site: Site) -> None:
    chunks = payloads(await site.stream(PATH, body("x", n=2, best_of=2, stream=True)))
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}
    assert site.engine.requests[0].sampling_config.logprobs is None


async def test_tokens_with_the_same_text_are_not_the_same_prompt(site: Site) -> None:
    """The first bytes of two characters are both shown as U+FFFD."""
    begin = ids_of("a text that is longer than a block")
    prompts = [[*begin, ids_of(character)[0]] for character in ("é", "€")]
    for prompt in prompts:
        await site.post(PATH, body(prompt))
    found = [
        site.engine.contexts[request.context_id][: len(prompt)]
        for request, prompt in zip(site.engine.requests, prompts, strict=True)
    ]
    assert found == prompts
