"""Grammars allow exactly the valid next tokens. A hostile grammar fails only its own request."""

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from parrot.engine.grammar.compiler import GrammarCompiler
from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.errors import InvalidRequest, QuotaExceeded
from parrot.protocol.sampling import SamplingConfig
from tests.support.byte_tokenizer import byte_tokenizer, plain_byte_tokenizer
from tests.support.masks import allowed, allowed_together

RESPONSE = byte_tokenizer()
TOKENIZER = Tokenizer.from_str(RESPONSE.tokenizer_json)
(EOS,) = RESPONSE.special_ids.eos


def make_compiler() -> GrammarCompiler:
    compiler = GrammarCompiler.of(RESPONSE, RESPONSE.vocab_size)
    assert compiler is not None
    return compiler


COMPILER = make_compiler()


def constraint_of(compiler: GrammarCompiler = COMPILER, **fields: Any) -> Constraint:
    constraint = asyncio.run(compiler.constraint(SamplingConfig(**fields)))
    assert constraint is not None
    return constraint


def random_text(constraint: Constraint, seed: int, limit: int = 400) -> str | None:
    """An output of random allowed tokens. Tokens that close a value are preferred. None if the
    output reached the limit."""
    rng = random.Random(seed)
    ids: list[int] = []
    while not constraint.is_complete and len(ids) < limit:
        choices = allowed(constraint, len(ids))
        ends = [i for i in choices if i == EOS or TOKENIZER.decode([i]) in ('"', "}", "]", "1")]
        token = rng.choice(ends if ends and rng.random() < 0.5 else choices)
        if token == EOS:
            break
        constraint.take(len(ids), token)
        ids.append(token)
    return None if len(ids) == limit else TOKENIZER.decode(ids)


def write(constraint: Constraint, text: str) -> int:
    """Check that the constraint allows the text, and take its tokens. Returns their number."""
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    for position, token in enumerate(ids):
        assert token in allowed(constraint, position), (text, position)
        constraint.take(position, token)
    return len(ids)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
def test_a_schema_as_an_object_or_as_text(schema: Any) -> None:
    constraint = constraint_of(json_schema=schema)
    assert EOS not in allowed(constraint, 0)
    write(constraint, '{"name": "Zoë 😀", "age": 7}')
    assert constraint.is_complete
    assert allowed(constraint, 31) is None


def test_an_output_may_end_only_where_it_is_complete() -> None:
    constraint = constraint_of(regex="ab(cd)*")
    assert EOS not in allowed(constraint, 0)
    position = write(constraint, "ab")
    assert not constraint.is_complete
    assert sorted(allowed(constraint, position)) == sorted([EOS, *TOKENIZER.encode("c").ids])
    constraint.take(position, EOS)
    assert constraint.is_complete


def test_with_ignored_eos_an_output_ends_where_no_token_may_follow() -> None:
    constraint = constraint_of(regex="ab?", ignore_tokenizer_eos=True)
    position = write(constraint, "a")
    assert EOS not in allowed(constraint, position)
    write_on = TOKENIZER.encode("b").ids[0]
    constraint.take(position, write_on)
    assert constraint.is_complete


def test_a_position_is_taken_once() -> None:
    constraint = constraint_of(regex="[ab]{3}")
    a, b = (TOKENIZER.encode(letter).ids[0] for letter in "ab")
    assert allowed(constraint, 1, before=a) == sorted([a, b])
    constraint.take(0, a)
    constraint.take(1, b)
    constraint.take(1, b)
    assert not constraint.is_complete
    constraint.take(2, a)
    assert constraint.is_complete


def test_a_forbidden_token_is_an_error_at_every_later_call() -> None:
    constraint = constraint_of(regex="[ab]{3}")
    wrong = TOKENIZER.encode("c").ids[0]
    assert not constraint.is_masked(1, before=wrong)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="the output cannot follow `regex`") as caught:
            constraint.take(0, wrong)
        assert caught.value.param == "regex"


def test_masks_of_a_batch_equal_those_of_each_output() -> None:
    wanted = [{"regex": "[ab]{3}"}, {"json_schema": PERSON}, {"choices": ["x", "yz"]}] * 4
    alone = [allowed(constraint_of(**fields), 0) for fields in wanted]
    batch = [
        constraint_of(**fields, ignore_tokenizer_eos=i % 2 == 0) for i, fields in enumerate(wanted)
    ]
    assert allowed_together(batch) == alone


def test_constraints_can_be_read_while_masks_are_computed() -> None:
    """Taking the same token again and reading `is_complete` need no matcher."""
    batch = [constraint_of(regex="([a-z]+ ){1000}") for _ in range(32)]
    a = TOKENIZER.encode("a").ids[0]
    for constraint in batch:
        constraint.take(0, a)
    failures: list[Exception] = []
    done = threading.Event()

    def engine() -> None:
        try:
            while not done.is_set():
                for constraint in batch:
                    constraint.take(0, a)
                    assert not constraint.is_complete
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=engine)
    thread.start()
    for position in range(1, 100):
        assert all(a in tokens for tokens in allowed_together(batch))
        for constraint in batch:
            constraint.take(position, a)
    done.set()
    thread.join()
    assert not failures


def test_an_output_continues_after_the_delivered_tokens() -> None:
    sampling = SamplingConfig(json_schema=PERSON)
    ids = TOKENIZER.encode('{"name": "Zo').ids
    constraint = asyncio.run(COMPILER.constraint(sampling, ids))
    assert constraint is not None
    write(constraint, 'ë", "age": 1}')
    with pytest.raises(InvalidRequest, match="not a prefix"):
        asyncio.run(COMPILER.constraint(sampling, TOKENIZER.encode("[").ids))


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value is valid for a schema of the kinds below."""
    match schema:
        case {"enum": options}:
            return value in options
        case {"type": "object", "properties": properties}:
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= value.keys() <= properties.keys()
                and all(is_valid(value[name], properties[name]) for name in value)
            )
        case {"type": "array"}:
            return isinstance(value, list) and all(
                is_valid(item, schema["items"]) for item in value
            )
        case {"anyOf": options}:
            return any(is_valid(value, option) for option in options)
    kinds = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[schema["type"]])


names = st.text("abé😀_", min_size=1, max_size=4)
leaves = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("integer", "boolean", "null")]),
    st.just({"type": "string", "maxLength": 3}),
    st.lists(st.one_of(names, st.integers(-9, 9)), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def _object(inner: dict[str, Any]) -> dict[str, Any]:
    required = [name for i, name in enumerate(inner) if i % 2 == 0]
    return {
        "type": "object",
        "properties": inner,
        "required": required,
        "additionalProperties": False,
    }


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(names, inner, max_size=3).map(_object),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_random_outputs_are_valid_for_their_schema(schema: dict[str, Any], seed: int) -> None:
    text = random_text(constraint_of(json_schema=schema), seed)
    if text is not None:
        assert is_valid(json.loads(text), schema), (text, schema)


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_choices_are_taken_exactly(choices: list[str], seed: int) -> None:
    assert random_text(constraint_of(choices=choices), seed) in choices
    for choice in choices:
        write(constraint_of(choices=choices), choice)


HOSTILE: list[dict[str, Any]] = [
    {"json_schema": {"type": "array", "uniqueItems": True}},
    {"json_schema": {"$ref": "http://127.0.0.1/schema"}},
    {"json_schema": {"type": "nothing"}},
    {"json_schema": "{"},
    {"json_schema": "[]"},
    {"json_schema": "[" * 60_000},
    {"json_schema": {"enum": ["x" * 70_000]}},
    {"json_schema": {"enum": list(range(70_000))}},
    {"json_schema": {"allOf": [{"anyOf": [{"type": "string"}] * 6}] * 12}},
    {"json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(10_000)}}},
    {"json_schema": {"$ref": "#"}},
    {"json_schema": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
    {"json_schema": {"type": "string", "pattern": "^(a|b)*c", "minLength": 1000}},
    {"json_schema": {"type": "object", "patternProperties": {f"{i}x": {} for i in range(300)}}},
    {"json_schema": {"type": "integer", "multipleOf": 10**15 + 1}},
    {"json_schema": '{"maximum": 1' + "0" * 5000 + "}"},
    {"json_schema": {"oneOf": [{"properties": {"k": {"const": i}}} for i in range(300)]}},
    {"regex": "("},
    {"regex": "é" * 40_000},
    {"regex": r"(?=a)b"},
    {"grammar": "start: missing"},
    {"grammar": 'start: "a'},
    {"grammar": ""},
    {"choices": ["x" * 40_000, "y" * 40_000]},
]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def exponential_schema(keyword: str) -> dict[str, Any]:
    """A schema with 8 ** 12 references to one definition."""
    steps = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 8} for i in range(12)}
    return {"$defs": {**steps, "a12": {"type": "string"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    "fields", [*HOSTILE, {"json_schema": nested(64)}], ids=lambda f: next(iter(f))
)
def test_invalid_and_too_large_grammars_are_refused_by_field(fields: dict[str, Any]) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        constraint_of(**fields)
    assert caught.value.param == next(iter(fields))
    assert len(caught.value.message) < 400
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a|aa)*b{1,2000}"},
        {"regex": "(.*a){30}.{30}"},
        {"json_schema": {"type": "string", "pattern": "^(a|a?)+$"}},
        {"json_schema": nested(60)},
        {"json_schema": {"type": "string", "pattern": "^(a|a)*(.*a.{20})$"}},
        {"json_schema": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}},
        {"json_schema": {"type": "string", "maxLength": 10**9}},
        {"json_schema": {"type": "array", "minItems": 10**9}},
        {"json_schema": {"enum": [f"value {i}" for i in range(4000)]}},
        {"json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}},
        {"json_schema": exponential_schema("anyOf")},
        {"json_schema": exponential_schema("allOf")},
        {"json_schema": {"type": "integer", "multipleOf": 99991, "minimum": 7, "maximum": 10**15}},
        {"grammar": 'start: start start | "a" | ""'},
    ],
)
def test_expensive_grammars_are_followed_or_refused_in_time(fields: dict[str, Any]) -> None:
    try:
        constraint = constraint_of(**fields)
    except InvalidRequest as error:
        assert "to compile" in error.message  # noqa: PT017 - on a machine that is busy
        return
    for position in range(20):
        began = time.process_time()
        tokens = allowed(constraint, position)
        assert time.process_time() - began < 2
        if tokens is None:
            return
        try:
            constraint.take(position, tokens[0])
        except InvalidRequest:
            return


def test_the_cache_of_lexers_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parrot.engine.grammar.compiler._MAX_LEXERS", 8)
    compiler = make_compiler()
    made: list[str] = []
    make = compiler._make

    def counted(field: str, text: str) -> Any:
        made.append(field)
        return make(field, text)

    monkeypatch.setattr(compiler, "_make", counted)
    for _ in range(3):
        constraint_of(compiler, regex="a+")
    constraint_of(compiler, json_schema=PERSON)
    constraint_of(compiler, json_schema=json.dumps(PERSON))
    assert made == ["regex", "json_schema"]
    for i in range(10):
        constraint_of(compiler, regex="b" * 40_000 + str(i))
    assert compiler._cache.weight == 8
    constraint_of(compiler, regex="a+")
    assert made.count("regex") == 12


def failure_of(constraint: Constraint, seed: int) -> InvalidRequest | None:
    """The error that ends an output of random letters under a grammar without an end."""
    rng, letters = random.Random(seed), [TOKENIZER.encode(letter).ids[0] for letter in "abcxyz"]
    for position in range(20_000):
        tokens = set(allowed(constraint, position) or ())
        try:
            constraint.take(
                position, rng.choice([letter for letter in letters if letter in tokens])
            )
        except InvalidRequest as error:
            return error
    return None


def test_an_output_whose_lexer_grows_without_end_fails() -> None:
    """The error names the field, and other outputs are not affected."""
    pattern = "[a-z]*a[a-z]{40}!|[a-z]*x[a-z]{45}!"
    first, second = (constraint_of(regex=pattern) for _ in range(2))
    for constraint in (first, second):
        error = failure_of(constraint, seed=3)
        assert error is not None
        assert error.param == "regex"
        assert re.search("the output cannot follow .*too many states", error.message), error.message
    assert failure_of(constraint_of(regex="[a-z]{3}[a-z]*"), seed=3) is None


@pytest.mark.parametrize(
    "grammar",
    [
        's: s s | "a"',
        's: s s s | s s | "a"?',
        "s: s s s s | s s s | s s | /[ab]/",
        's: t s | s t | "a"\nt: s t | t s | "a" "a"',
        's: "a" s "a" | "a" s | s "a" | "a"',
    ],
)
def test_an_ambiguous_grammar_fails_before_it_is_slow(grammar: str) -> None:
    """A step looks at pairs of the parser's items, so their number is limited."""
    constraint = constraint_of(grammar=f"start: s\n{grammar}")
    other = constraint_of(grammar='start: ("a" | "b")*')
    (letter,) = TOKENIZER.encode("a").ids

    def follow() -> None:
        for position in range(260):
            _, others = allowed_together([constraint, other])
            assert letter in others
            other.take(position, letter)
            constraint.take(position, letter)

    with pytest.raises(InvalidRequest, match=r"the output cannot follow .* items.*500") as caught:
        follow()
    assert caught.value.param == "grammar"


def test_long_outputs_and_large_unambiguous_grammars_are_followed() -> None:
    (letter, comma) = TOKENIZER.encode("a,").ids
    several = constraint_of(grammar='start: list\nlist: list "," item | item\nitem: "a" | "b"')
    words = " | ".join(f'"word {i}"' for i in range(400))
    many = constraint_of(grammar=f'start: ({words} | "a,")*')
    for constraint in (several, many):
        for position in range(3000):
            token = comma if position % 2 else letter
            assert token in (allowed(constraint, position) or ())
            constraint.take(position, token)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(300)}}
    wide = constraint_of(json_schema=schema | {"additionalProperties": False})
    for position, token in enumerate(TOKENIZER.encode('{"p7":null,"p299":null}').ids):
        wide.take(position, token)
    assert wide.is_complete


def counted_lexers(compiler: GrammarCompiler) -> list[int]:
    """For each lexer of the cached grammars, the number of outputs that use the lexer."""
    grammars = [compiler._cache.peek(key) for key in compiler._cache]
    return sorted(len(lexer.users) for g in grammars if g is not None for lexer in g.lexers)


def test_outputs_at_the_same_time_share_a_lexer_only_if_there_are_more_than_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("parrot.engine.grammar.compiler._QUICK_S", 60.0)
    compiler = GrammarCompiler(COMPILER._tokenizer, COMPILER._vocabulary.eos, mask_threads=3)
    for _ in range(3):
        constraint_of(compiler, regex="[ab]{3}")
    assert counted_lexers(compiler) == [0]
    batch = [constraint_of(compiler, regex="[ab]{3}") for _ in range(5)]
    assert counted_lexers(compiler) == [1, 2, 2]
    assert allowed_together(batch) == [allowed(batch[0], 0)] * 5
    batch = [constraint_of(compiler, regex="[ab]{3}")]
    assert counted_lexers(compiler) == [0, 0, 1]

    async def together() -> list[Constraint | None]:
        sampling = SamplingConfig(regex="[cd]{3}")
        return await asyncio.gather(*(compiler.constraint(sampling) for _ in range(5)))

    cold = asyncio.run(together())
    # Two of the outputs have a lexer that is not cached.
    assert counted_lexers(compiler) == [0, 0, 1, 1, 1, 1]
    assert len(cold) == 5


def test_masks_of_one_lexer_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parrot.engine.grammar.compiler._QUICK_S", 60.0)
    compiler = GrammarCompiler(COMPILER._tokenizer, COMPILER._vocabulary.eos, mask_threads=3)
    texts = ["[ab]{3}", "[cd]{3}"] * 6
    batch = [constraint_of(compiler, regex=text) for text in texts]
    batch += batch[0].ahead(0, TOKENIZER.encode("a").ids)[1:]
    given: list[Any] = []

    class Threads:
        def unsafe_compute_mask_ptr(self, matchers: list[Any], *args: Any) -> None:
            given.extend(batch[i]._lexer_id for _, i in matchers)
            COMPILER._vocabulary.threads.unsafe_compute_mask_ptr(matchers, *args)

    object.__setattr__(compiler._vocabulary, "threads", Threads())
    assert allowed_together(batch[:12]) == [allowed(one, 0) for one in batch[:12]]
    given.clear()
    allowed_together(batch[:12])
    assert len(given) == 12
    assert len(set(given)) == sum(a != b for a, b in pairwise([None, *given])) == 6
    assert batch[12]._lexer_id == batch[0]._lexer_id


def test_slow_lexers_are_shared_and_outputs_do_not_wait_for_busy_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = GrammarCompiler(COMPILER._tokenizer, COMPILER._vocabulary.eos, mask_threads=3)
    monkeypatch.setattr("parrot.engine.grammar.compiler._QUICK_S", 0.0)
    batch = [constraint_of(compiler, regex="[ab]{3}") for _ in range(3)]
    assert counted_lexers(compiler) == [3]

    monkeypatch.setattr("parrot.engine.grammar.compiler._QUICK_S", 60.0)

    async def busy(field: str, text: str, deadline_s: float) -> Any:
        raise QuotaExceeded("the engine is compiling too many grammars")

    monkeypatch.setattr(compiler, "_compile", busy)
    batch.append(constraint_of(compiler, regex="[ab]{3}"))
    assert counted_lexers(compiler) == [4]


def test_a_slow_grammar_is_refused_and_others_must_retry_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, eos = COMPILER._tokenizer, COMPILER._vocabulary.eos
    compiler = GrammarCompiler(tokenizer, eos, deadline_s=0.05)
    make = compiler._make

    async def main() -> None:
        loop_runs, release = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def stuck(field: str, text: str) -> Any:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return make(field, text)

        monkeypatch.setattr(compiler, "_make", stuck)
        loop.call_soon(loop_runs.set)
        outcomes: Sequence[Any] = await asyncio.gather(
            *(compiler.constraint(SamplingConfig(regex=f"a{i}")) for i in range(3)),
            return_exceptions=True,
        )
        assert loop_runs.is_set()
        assert [type(outcome) for outcome in outcomes] == [
            InvalidRequest,
            InvalidRequest,
            QuotaExceeded,
        ]
        assert "0.05 s" in outcomes[0].message
        release.set()
        monkeypatch.setattr(compiler, "_make", make)
        compiler._deadline_s = 5.0
        assert await compiler.constraint(SamplingConfig(regex="a9")) is not None

    asyncio.run(main())
    compiler.close()


def test_without_an_eos_token_an_output_ends_where_no_token_may_follow() -> None:
    compiler = GrammarCompiler.of(plain_byte_tokenizer(259), 259)
    assert compiler is not None
    constraint = constraint_of(compiler, regex="é")
    write(constraint, "é")
    assert constraint.is_complete
