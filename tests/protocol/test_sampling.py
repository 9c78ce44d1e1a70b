from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from parrot.protocol.errors import UnsupportedField
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import (
    NEUTRAL_SAMPLING,
    DefaultSampling,
    Logprobs,
    ResolvedSampling,
    SamplingConfig,
    WireLogprobs,
)


def test_defaults_are_those_of_the_public_surface() -> None:
    config = SamplingConfig()
    assert config.max_gen_length == 512
    assert config.stop_strings == ()
    assert not config.is_greedy
    assert not config.is_deterministic


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("max_gen_length", 0),
        ("n", 17),
        ("n", 10**30),
        ("seed", -1),
        ("stop_token_ids", [-1]),
        ("stop_str", ""),
        ("stop_str", [""]),
        ("stop_str", ["x"] * 17),
        ("logit_bias", {"5": 1000.0}),
        ("repetition_penalty", -1.0),
    ],
)
def test_out_of_bounds_values_are_rejected_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingConfig.model_validate({field: value})
    assert caught.value.errors()[0]["loc"][0] == field


def test_unset_fields_come_from_the_engine_and_then_the_model() -> None:
    of_model = DefaultSampling(temperature=0.6, top_k=20, repetition_penalty=1.1)
    of_engine = DefaultSampling(temperature=0.3, min_p=0.0).over(of_model)
    found = of_engine.resolve(SamplingConfig(top_p=0.5, seed=7, max_gen_length=3))
    assert (found.temperature, found.top_p, found.top_k) == (0.3, 0.5, 20)
    assert (found.min_p, found.repetition_penalty) == (0.0, 1.1)
    assert (found.seed, found.max_gen_length) == (7, 3)
    off = {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    neutral = of_engine.resolve(SamplingConfig.model_validate(off))
    assert (neutral.temperature, neutral.top_k, neutral.adjusts_logits) == (1.0, None, False)
    assert NEUTRAL_SAMPLING.resolve(SamplingConfig()) == ResolvedSampling(min_p=0.0)


@pytest.mark.parametrize("constraint", [{"regex": "a+"}, {"json_schema": {}}, {"choices": ["a"]}])
def test_with_a_grammar_no_default_repetition_penalty_applies(constraint: dict[str, Any]) -> None:
    defaults = DefaultSampling(repetition_penalty=1.1)
    unset = SamplingConfig.model_validate(constraint)
    assert not defaults.resolve(unset).adjusts_logits
    own = SamplingConfig.model_validate(constraint | {"repetition_penalty": 1.3})
    assert defaults.resolve(own).repetition_penalty == 1.3


def test_fields_that_are_not_set_are_not_sent() -> None:
    unset = SamplingConfig.model_validate(dict(SamplingConfig()) | {"max_gen_length": 4})
    assert unset.model_dump(exclude_defaults=True) == {"max_gen_length": 4}
    own = SamplingConfig(temperature=1.0, top_p=1.0, repetition_penalty=0.0)
    sent = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 0.0}
    assert own.model_dump(exclude_defaults=True) == sent


def test_disabled_fields_need_no_support_of_the_engine() -> None:
    off = {"temperature": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert SamplingConfig.model_validate(off).needs() == frozenset()
    assert SamplingConfig(top_k=3, temperature=0.5).needs() == {"top_k", "temperature"}


def test_unknown_fields_are_rejected() -> None:
    with pytest.raises(ValidationError, match="temprature"):
        SamplingConfig.model_validate({"temprature": 0.5})


def test_wire_forms_are_accepted() -> None:
    config = SamplingConfig.model_validate(
        {"stop_str": ["a", "b"], "logit_bias": {"5": 1.5}, "stop_token_ids": [2], "temperature": 0}
    )
    assert config.stop_strings == ("a", "b")
    assert config.logit_bias == {5: 1.5}
    assert config.is_greedy
    assert config.is_deterministic
    assert SamplingConfig(stop_str="x").stop_strings == ("x",)
    assert SamplingConfig(seed=3).is_deterministic


def test_the_error_for_unsupported_fields_names_them() -> None:
    config = SamplingConfig(temperature=0.5, regex="a+")
    assert config.constraint == "regex"
    assert SamplingConfig().constraint is None
    config.require_support(frozenset({"temperature", "regex"}), "this engine")
    with pytest.raises(UnsupportedField, match="this engine does not support `regex`") as caught:
        config.require_support(frozenset({"temperature"}), "this engine")
    assert caught.value.param == "regex"
    SamplingConfig(n=1).require_support(frozenset(), "an engine of defaults only")


def test_criteria_are_read_in_any_case() -> None:
    assert PerformanceCriteria("ttft") is PerformanceCriteria.TTFT
    assert PerformanceCriteria("Latency") is PerformanceCriteria.LATENCY
    with pytest.raises(ValueError, match="speed"):
        PerformanceCriteria("speed")


def test_an_output_has_one_constraint() -> None:
    with pytest.raises(ValidationError, match="`regex` and `choices` exclude each other"):
        SamplingConfig(regex="a", choices=("a",))
    with pytest.raises(ValidationError):
        SamplingConfig(choices=())


class Carrier(BaseModel):
    logprobs: WireLogprobs | None = None


@pytest.mark.parametrize("tokens", [None, [b"a", b"\xe2\x82", b""]])
def test_log_probabilities_can_be_serialized(tokens: list[bytes] | None) -> None:
    sent = Logprobs(2, [0, 1, 2, 0], [-0.5, -1e-9, -30.25, -1.0], tokens)
    body = Carrier(logprobs=sent).model_dump_json()
    assert Carrier.model_validate_json(body).logprobs == sent
    assert Carrier(logprobs=sent).logprobs is sent
    assert len(sent) == 2
    assert sent.num_bytes >= 32


def test_log_probabilities_are_cut_and_joined() -> None:
    whole = Logprobs(2, [0, 1, 2, 0, 1, 1], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    first = whole.part(0, 1)
    first.extend(whole.part(1))
    assert first == whole
    assert len(whole.part(1, 2)) == 1


@pytest.mark.parametrize("first_tokens", [{0: b"a", 1: b"x"}, [b"a", b"x"]])
def test_log_probabilities_of_other_tokens_are_appended(first_tokens: Any) -> None:
    """The first attempt was on one engine, the second on one with another tokenizer."""
    both = Logprobs(2, [1, 0, 0, -1], [-1.0, -2.0, -3.0, 0.0], first_tokens)
    both.extend(Logprobs(2, [1, -1], [-4.0, 0.0], [b"b", b"y"]))
    assert both.tokens is not None
    tokens = [None if i < 0 else both.tokens[i] for i in both.ids]
    assert tokens == [b"x", b"a", b"a", None, b"y", None]
    assert list(both.values) == [-1.0, -2.0, -3.0, 0.0, -4.0, 0.0]
    assert list(first_tokens) in ([0, 1], [b"a", b"x"])


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 0},
        {"width": 3},
        {"width": "2"},
        {"ids": "!"},
        {"ids": "AAA="},
        {"values": ""},
        {"ids": "/v///wAAAAA="},
        {"ids": "/////wAAAAA="},
        {"tokens": ["a"], "ids": "AAAAAAEAAAA="},
        {"tokens": [1]},
        {"tokens": ["€"]},
        {"tokens": 3},
        {"values": None},
    ],
)
def test_broken_log_probabilities_are_rejected(fields: dict[str, Any]) -> None:
    good = {"width": 2, "ids": "AAAAAAAAAAA=", "values": "AAAAAAAAAAA=", "tokens": None}
    assert Carrier.model_validate({"logprobs": good}).logprobs == Logprobs(2, [0, 0], [0.0, 0.0])
    with pytest.raises(ValidationError):
        Carrier.model_validate({"logprobs": good | fields})
