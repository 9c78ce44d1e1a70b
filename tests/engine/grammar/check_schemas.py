"""Check that every output that a schema's grammar allows is valid for the schema.

    python -m tests.engine.grammar.check_schemas --count 1000
    python -m tests.engine.grammar.check_schemas --suite JSON-Schema-Test-Suite/tests/draft2020-12
    python -m tests.engine.grammar.check_schemas --count 1000 --device cuda

With random schemas, the outputs are random allowed tokens, or outputs of the embedded model on
`--device`. With `--suite`, schemas and values come from the JSON Schema Test Suite. The package
jsonschema validates the outputs."""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from parrot.engine.config import BuiltinConfig
from parrot.engine.engine_types import create_service
from parrot.protocol.engine_api import FinishReason, GenerateRequest
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.sampling import SamplingConfig
from tests.engine.grammar.test_grammar_compiler import (
    COMPILER,
    TOKENIZER,
    constraint_of,
    random_text,
)
from tests.support.random_schemas import Json, Schemas

PROMPTS = ["Answer in JSON: ", "Once upon a time", "}]\"'{", "List ten things. ", "数字: "]


def validation_error(schema: Json, text: str) -> str | None:
    """The reason why the text is not valid for the schema, or None if it is valid."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"{error}: {text!r}"
    error = next(validator.iter_errors(value), None)
    return None if error is None else f"{error.message}: {text!r} of {json.dumps(schema)}"


def check_random(count: int, seed: int) -> Counter[str]:
    """Check random schemas until `count` of them had a finished output. Raises `AssertionError` for
    an invalid output."""
    schemas, counts = Schemas(seed), Counter[str]()
    while counts["valid"] < count:
        schema = schemas.draw()
        try:
            texts = [random_text(constraint_of(json_schema=schema), i) for i in range(3)]
        except InvalidRequest:
            counts["refused"] += 1
            continue
        ended = [text for text in texts if text is not None]
        for text in ended:
            assert (reason := validation_error(schema, text)) is None, reason
        counts["valid" if ended else "endless"] += 1
        counts["outputs"] += len(ended)
    return counts


async def check_model(count: int, seed: int, device: str) -> Counter[str]:
    """Check one output of the embedded model for each of `count` schemas, 32 at a time."""
    service = create_service(BuiltinConfig(model="embedded", device=device))
    await service.start()
    schemas, counts, at_once = Schemas(seed), Counter[str](), asyncio.Semaphore(32)

    async def ask(number: int, schema: Json) -> None:
        sampling = {
            "json_schema": schema,
            "max_gen_length": 300,
            "temperature": 1.0,
            "seed": number,
        }
        prompt = {"context_id": number, "text": PROMPTS[number % len(PROMPTS)]}
        request = {"context_id": number, "fills": [prompt], "sampling_config": sampling}
        async with at_once:
            try:
                answer = await service.generate(GenerateRequest.model_validate(request))
            except InvalidRequest:
                counts["refused"] += 1
                return
        if answer.finish_reason is not FinishReason.STOP:
            counts["cut"] += 1
            return
        assert (reason := validation_error(schema, answer.generated_text)) is None, reason
        counts["valid"] += 1

    await asyncio.gather(*(ask(number, schemas.draw()) for number in range(1, count + 1)))
    await service.close()
    return counts


def check_suite(folder: Path) -> Counter[str]:
    """Check that the grammars reject all invalid values. They may reject valid values in a form
    that they never write, such as 1.0 for an integer."""
    counts = Counter[str]()
    for path in sorted(folder.rglob("*.json")):
        for case in json.loads(path.read_text()):
            if not isinstance(case["schema"], dict):
                continue
            sampling = SamplingConfig(json_schema=case["schema"])
            try:
                constraint = asyncio.run(COMPILER.constraint(sampling))
            except InvalidRequest:
                counts["refused schemas"] += 1
                continue
            assert constraint is not None
            counts["schemas"] += 1
            for test in case["tests"]:
                counts[_suite_outcome(constraint, test, path.name)] += 1
    return counts


def _suite_outcome(constraint: Any, test: Json, name: str) -> str:
    ids = TOKENIZER.encode(json.dumps(test["data"], ensure_ascii=False)).ids
    matcher = constraint._matcher.deep_copy()
    fits = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    assert test["valid"] or not fits, f"{name}: the grammar accepts {test}"
    return "values as expected" if fits == test["valid"] else "values that are never written"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--device", help="device of the embedded model; without it, random tokens")
    parser.add_argument("--suite", type=Path)
    args = parser.parse_args()
    if args.suite is not None:
        counts = check_suite(args.suite)
    elif args.device is not None:
        counts = asyncio.run(check_model(args.count, args.seed, args.device))
    else:
        counts = check_random(args.count, args.seed)
    print(json.dumps({"seed": args.seed, "invalid": 0, **counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
