"""Completions that include their prompt with log probabilities. Harnesses use them to score
texts."""

from typing import Any

import pytest

from parrot.gateway.vendors import completions
from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import UnsupportedField
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, payloads, serve
from tests.gateway.vendors.test_completions import PATH, body, ids_of
from tests.gateway.vendors.test_logprobs import logprob
from tests.support.fake_engine import Script, fake_engine


def rows(text: str, num_top: int, offset: int = 0) -> dict[str, list[Any]]:
    """Return the log probabilities in the answer, for tokens of one byte."""
    likely = [{chr(ord(c) + i): logprob(ord(c) + i) for i in range(max(1, num_top))} for c in text]
    return {
        "tokens": list(text),
        "token_logprobs": [logprob(ord(c)) for c in text],
        "top_logprobs": likely,
        "text_offset": list(range(offset, offset + len(text))),
    }


def of_prompt(text: str, num_top: int) -> dict[str, list[Any]]:
    found = rows(text, num_top)
    for name in ("token_logprobs", "top_logprobs"):
        found[name][0] = None
    return found


def joined(*parts: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [one for part in parts for one in part[name]] for name in parts[0]}


@pytest.mark.parametrize("num_top", [0, 1, 3])
@pytest.mark.parametrize("is_text", [True, False])
async def test_only_the_prompt(site: Site, is_text: bool, num_top: int) -> None:
    texts = ["abcab", "x"]
    prompts = texts if is_text else [ids_of(text) for text in texts]
    asked = body(prompts, echo=True, logprobs=num_top, max_tokens=0, temperature=0)
    answer = await site.post(PATH, asked)
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}
    for i, (choice, text) in enumerate(zip(answer["choices"], texts, strict=True)):
        want = {"index": i, "text": text, "finish_reason": "length"}
        assert choice == want | {"logprobs": of_prompt(text, num_top)}
    assert not site.engine.requests
    (scored,) = site.engine.scored
    assert [list(one) for one in scored.inputs] == [ids_of(text) for text in texts]
    assert scored.num_top == num_top
    chunks = payloads(await site.stream(PATH, asked | {"stream": True}))
    assert [chunk["choices"][0] for chunk in chunks] == answer["choices"]


async def test_a_prompt_without_log_probabilities(site: Site) -> None:
    answer = await site.post(PATH, body("abc", echo=True, max_tokens=0, n=2))
    want = {"text": "abc", "logprobs": None, "finish_reason": "length"}
    assert answer["choices"] == [want | {"index": 0}, want | {"index": 1}]
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("is_text", [True, False])
async def test_a_prompt_and_its_continuation(site: Site, is_text: bool) -> None:
    """This holds for each choice, also in a stream, where the first delta includes the prompt. The
    end token has log probabilities as well, because harnesses count tokens."""
    site.engine.script = Script(text=lambda prompt: prompt.upper())
    prompts: list[Any] = ["ab", "cde"] if is_text else [ids_of("ab"), ids_of("cde")]
    asked = body(prompts, echo=True, logprobs=1, n=2)
    answer = await site.post(PATH, asked)
    for i, (choice, text) in enumerate(
        zip(answer["choices"], ["ab", "ab", "cde", "cde"], strict=True)
    ):
        assert (choice["index"], choice["text"]) == (i, text + text.upper())
        found = choice["logprobs"]
        (end,) = [column.pop() for column in [found["tokens"]]]
        assert end.startswith("<|")
        assert [found[name].pop() for name in ("token_logprobs", "text_offset")][1] == 2 * len(text)
        found["top_logprobs"].pop()
        assert found == joined(of_prompt(text, 1), rows(text.upper(), 1, len(text)))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 14)
    again = await site.post(PATH, asked)
    streamed: dict[int, list[dict[str, Any]]] = {}
    texts = [""] * 4
    for chunk in payloads(await site.stream(PATH, asked | {"stream": True})):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["logprobs"] is not None:
            streamed.setdefault(choice["index"], []).append(choice["logprobs"])
    assert texts == [choice["text"] for choice in again["choices"]]
    for i, choice in enumerate(again["choices"]):
        assert joined(*streamed[i]) == choice["logprobs"]


async def test_as_many_entries_as_tokens(site: Site) -> None:
    """A harness lets the server generate one token and drops its entry, which is the last one. The
    entry exists even if that token ends the text."""
    for script in (
        Script(text=lambda _: "", stop_token=True),
        Script(text=lambda _: "z", stop_token=False, finish_reason=FinishReason.LENGTH),
    ):
        site.engine.script = script
        asked = body([ids_of("abcd")], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1)
        (choice,) = (await site.post(PATH, asked))["choices"]
        kept = {name: column[:-1] for name, column in choice["logprobs"].items()}
        assert kept == of_prompt("abcd", 1)


async def test_a_bos_token_is_the_first() -> None:
    engine = fake_engine("e0", model=MODEL, add_bos=True)
    async with serve(CoreConfig(), engine) as site:
        for prompt in ("héy", [engine.tokenizer_response.special_ids.bos, *ids_of("héy")]):
            asked = body(prompt, echo=True, logprobs=0, max_tokens=0)
            (choice,) = (await site.post(PATH, asked))["choices"]
            assert choice["text"] == "héy"
            found = choice["logprobs"]
            assert found["token_logprobs"][0] is None
            assert found["tokens"][1:] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y"]
            assert found["text_offset"] == [0, 0, 1, 1, 2]


async def test_engines_of_text_report_their_own_tokens() -> None:
    async with serve(CoreConfig(), fake_engine("e0", model=MODEL, text=True)) as site:
        asked = body("abc", echo=True, logprobs=1, max_tokens=0)
        answer = await site.post(PATH, asked)
        assert answer["choices"][0]["logprobs"] == of_prompt("abc", 1)
        assert answer["usage"]["prompt_tokens"] == 3
        assert site.engine.scored[0].inputs == ["abc"]
        site.engine.script = Script(error=UnsupportedField("no log probabilities", param="echo"))
        status, answer = await site.send(PATH, asked)
        assert (status, answer["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "parrot": {"defer": True}}, "echo"),
        ({"echo": True, "logprobs": 1, "parrot": {"session_id": 1}}, "echo"),
        ({"echo": True, "max_tokens": 0, "prompt": [2**20]}, "prompt"),
        ({"echo": True, "max_tokens": 0, "prompt": "x" * 60_000}, "input"),
        ({"echo": True, "logprobs": 1, "best_of": 2, "stream": True}, "best_of"),
    ],
)
async def test_unsupported_fields_are_named(site: Site, fields: dict[str, Any], param: str) -> None:
    status, answer = await site.send(PATH, body("Hi") | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert not site.engine.scored


async def test_the_size_of_an_answer_is_limited(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "_MAX_SCORED", 100)
    asked = body(["x" * 20, "y" * 5], echo=True, max_tokens=0, logprobs=1)
    assert len((await site.post(PATH, asked | {"n": 4}))["choices"]) == 8
    status, answer = await site.send(PATH, asked | {"n": 5})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert "25 tokens" in answer["error"]["message"]
