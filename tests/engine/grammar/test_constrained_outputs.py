"""Constrained outputs of the embedded model, through the builtin engine's service."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from parrot.engine.config import BuiltinConfig, SimConfig
from parrot.engine.engine_types import create_service
from parrot.engine.grammar.constraint import Constraint
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import FinishReason, GenerateRequest, GenerateResponse
from parrot.protocol.errors import InvalidRequest, UnsupportedField

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[EngineService]:
    """The service computes in float32, so an output does not depend on the other rows of a step."""
    config = BuiltinConfig(
        model="embedded",
        device="cpu",
        dtype="float32",
        instance={"num_kv_cache_blocks": 512, "num_threads": 1},
    )
    service = create_service(config)
    await service.start()
    yield service
    service.check_integrity()
    await service.close()


class Asker:
    """Requests outputs, each with a new context."""

    num_contexts = 0

    def __init__(self, service: EngineService) -> None:
        self.service = service

    def request(self, prompt: str, **sampling: Any) -> GenerateRequest:
        Asker.num_contexts += 1
        number = Asker.num_contexts
        given = {"temperature": 0, "max_gen_length": 80, **sampling}
        return GenerateRequest.model_validate(
            {
                "context_id": number,
                "fills": [{"context_id": number, "text": prompt}],
                "sampling_config": given,
            }
        )

    async def __call__(self, prompt: str, **sampling: Any) -> GenerateResponse:
        return await self.service.generate(self.request(prompt, **sampling))


@pytest.fixture
def ask(service: EngineService) -> Asker:
    return Asker(service)


def object_schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 12}
SCHEMAS: list[dict[str, Any]] = [
    object_schema(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 150}),
    object_schema(ok={"type": "boolean"}),
    object_schema(nothing={"type": "null"}),
    object_schema(colour={"enum": ["red", "grün", "青", "🟦"]}),
    object_schema(
        point=object_schema(x={"type": "integer", "minimum": 0, "maximum": 9}, y={"const": 3})
    ),
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 3},
    {"type": "array", "items": object_schema(k=WORD), "minItems": 1, "maxItems": 2},
    {"anyOf": [{"const": "yes"}, {"const": "no"}]},
    object_schema(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    {"$defs": {"leaf": {"enum": [1, 2]}}, **object_schema(leaf={"$ref": "#/$defs/leaf"})},
    object_schema(when={"type": "string", "format": "date"}),
    object_schema(price={"type": "number", "minimum": 1, "maximum": 2}),
]


SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.95}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def described(service: EngineService) -> list[list[GenerateResponse]]:
    """An answer for each schema and sampling. The requests run in parallel, which takes few more
    steps than the longest output."""
    ask = Asker(service)
    prompt = "Describe a thing as JSON: "
    answers = iter(
        await asyncio.gather(
            *(ask(prompt, json_schema=schema, **s) for schema in SCHEMAS for s in SAMPLINGS)
        )
    )
    return [[next(answers) for _ in SAMPLINGS] for _ in SCHEMAS]


@pytest.mark.parametrize(
    ("index", "schema"),
    list(enumerate(SCHEMAS)),
    ids=[json.dumps(schema)[:40] for schema in SCHEMAS],
)
async def test_the_answer_is_json_of_the_schema(
    described: list[list[GenerateResponse]], index: int, schema: dict[str, Any]
) -> None:
    for answer in described[index]:
        assert answer.finish_reason is FinishReason.STOP, answer
        value = json.loads(answer.generated_text)
        for name in schema.get("required", ()):
            assert name in value


async def test_any_object(ask: Asker) -> None:
    answer = await ask("A person as JSON: ", json_schema={"type": "object"})
    assert isinstance(json.loads(answer.generated_text), dict)


async def test_choices_regex_and_grammar(ask: Asker) -> None:
    choices = ["definitely", "not\nat \"all\"", "é😀"]  # fmt: skip
    chosen, matched, parsed = await asyncio.gather(
        ask("Is it so? ", choices=choices),
        ask("Smile: ", regex="[😀-🙏]{2,3}é", temperature=1.0, seed=1),
        ask("1 + ", grammar='start: NUM ("+" NUM)~2\nNUM: /[0-9]{1,2}/'),
    )
    assert chosen.generated_text in choices
    assert re.fullmatch("[😀-🙏]{2,3}é", matched.generated_text)
    assert re.fullmatch(r"\d+\+\d+\+\d+", parsed.generated_text)


async def test_together_with_all_other_settings(ask: Asker) -> None:
    """A logit bias cannot select a token that the grammar forbids, and a stop string ends the
    output."""
    fields = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "logit_bias": {44: 100.0}}
    sampled, stopped, endless, cut = await asyncio.gather(
        ask("Number: ", regex="[0-9]{8}", temperature=0.8, top_k=5, seed=2, **fields),
        ask("Number: ", regex="1{4}2{4}", stop_str="22"),
        ask("Number: ", regex="[0-9]{3}", ignore_tokenizer_eos=True),
        ask("Number: ", regex="[0-9]{50}", max_gen_length=5),
    )
    assert re.fullmatch("[0-9]{8}", sampled.generated_text)
    assert stopped.generated_text == "1111"
    assert re.fullmatch("[0-9]{3}", endless.generated_text)
    assert cut.finish_reason is FinishReason.LENGTH


async def test_a_stream_gives_the_same_text(ask: Asker) -> None:
    request = ask.request("A thing as JSON: ", json_schema=SCHEMAS[4])

    async def streamed() -> list[Any]:
        return [event async for event in ask.service.generate_stream(request)]

    whole, events = await asyncio.gather(
        ask("A thing as JSON: ", json_schema=SCHEMAS[4]), streamed()
    )
    assert "".join(getattr(event, "text", "") for event in events) == whole.generated_text
    assert isinstance(events[-1], GenerateResponse)


async def test_a_batch_gives_what_each_gives_alone(ask: Asker) -> None:
    wanted: list[dict[str, Any]] = [
        {"json_schema": SCHEMAS[1]},
        {"max_gen_length": 12},
        {"choices": ["left", "right"], "temperature": 1.0, "seed": 5},
        {"max_gen_length": 12, "temperature": 1.0, "seed": 5},
        {"regex": "[a-z]{4}", "frequency_penalty": 1.0},
    ]
    alone = [(await ask("The thing is ", **fields)).generated_ids for fields in wanted]
    together = await asyncio.gather(*(ask("The thing is ", **fields) for fields in wanted))
    assert [answer.generated_ids for answer in together] == alone


async def test_forks_and_continued_contexts(ask: Asker) -> None:
    first = ask.request("A number, then a letter: ", regex="[0-9]{3}")
    await ask.service.generate(first)
    sampling = {"temperature": 0, "regex": "[a-z]{3}"}
    for fork in (first.context_id, 10_001):
        fills = [
            {"context_id": fork, "parent_context_id": first.context_id, "text": ", "}
            if fork != first.context_id
            else {"context_id": fork, "text": "; "}
        ]
        request = {"context_id": fork, "fills": fills, "sampling_config": sampling}
        answer = await ask.service.generate(GenerateRequest.model_validate(request))
        assert re.fullmatch("[a-z]{3}", answer.generated_text)


async def test_a_wrong_grammar_fails_its_call_and_no_other(ask: Asker) -> None:
    good, *bad = await asyncio.gather(
        ask("Once upon ", max_gen_length=8),
        ask("x", json_schema={"type": "array", "uniqueItems": True}),
        ask("x", regex="("),
        ask("x", grammar="start: nothing"),
        return_exceptions=True,
    )
    assert isinstance(good, GenerateResponse)
    for error, param in zip(bad, ("json_schema", "regex", "grammar"), strict=True):
        assert isinstance(error, InvalidRequest)
        assert error.param == param


async def test_a_grammar_that_cannot_be_followed_fails_its_call(
    ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Constraint, "is_masked", lambda *_, **__: False)
    with pytest.raises(InvalidRequest, match="the output cannot follow"):
        await ask("Once upon ", regex="[😀-🙏]{3}")
    monkeypatch.undo()
    assert (await ask("Once upon ", regex="[0-9]")).finish_reason is FinishReason.STOP


async def test_the_simulated_engine_has_no_grammars() -> None:
    service = create_service(SimConfig())
    await service.start()
    with pytest.raises(UnsupportedField, match="`choices`"):
        await Asker(service)("x", choices=["a"])
    await service.close()
