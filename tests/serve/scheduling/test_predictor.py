"""Predicted lengths and durations, learned from finished calls."""

import pytest
from hypothesis import given as fuzz
from hypothesis import strategies as st

from parrot.protocol.engine_api import StepCosts, Usage
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    NativeCall,
    SemanticVariable,
    TextPiece,
    TokenizedText,
    VariablePiece,
)
from parrot.serve.scheduling.load import LoadIndex
from parrot.serve.scheduling.task import Estimates, OutputLengths, Pace

NATIVE = NativeCall(
    id=1,
    request_id=1,
    session_id=1,
    options=CallOptions("f"),
    source="",
    timeout_s=1.0,
    arguments=(),
    results=(),
)


def completion(
    template: str = "Do it: ",
    *inputs: SemanticVariable,
    tenant: str = "t",
    models: tuple[str, ...] = (),
    **sampling: object,
) -> Completion:
    return Completion(
        id=1,
        request_id=1,
        session_id=1,
        options=CallOptions("f", models=models, cache_salt=tenant),
        fill=(TextPiece(template), *map(VariablePiece, inputs)),
        output=SemanticVariable("o", "o", 1),
        sampling=SamplingConfig.model_validate(sampling),
    )


def usage(output: int, prompt: int = 0, prefill_s: float = 0.0, decode_s: float = 0.0) -> Usage:
    return Usage(
        computed_tokens=prompt, output_tokens=output, prefill_s=prefill_s, decode_s=decode_s
    )


def test_a_fixed_length_is_predicted_exactly() -> None:
    estimates = Estimates(LoadIndex().pace)
    fixed = completion(max_gen_length=77, ignore_tokenizer_eos=True)
    assert estimates.output_tokens(fixed) == 77
    estimates.learn(fixed, 8, usage(5))
    assert estimates.output_tokens(fixed) == 77
    stopped = completion(max_gen_length=77, ignore_tokenizer_eos=True, stop_str="END")
    assert estimates.output_tokens(stopped) < 77


def test_lengths_are_learned_per_template_and_tenant() -> None:
    estimates = Estimates(LoadIndex().pace)
    mine = completion(max_gen_length=1000)
    assert estimates.output_tokens(mine) == 501
    estimates.learn(mine, 8, usage(50))
    # One answer has the weight of the prior.
    assert estimates.output_tokens(mine) == 1 + (500 + 50) // 2
    for _ in range(100):
        estimates.learn(mine, 8, usage(50))
    assert 50 < estimates.output_tokens(mine) < 70
    assert estimates.output_tokens(completion("Else: ", max_gen_length=1000)) == 501
    assert estimates.output_tokens(completion(max_gen_length=1000, tenant="u")) == 501
    # The same lengths with an earlier limit.
    assert estimates.output_tokens(completion(max_gen_length=20)) <= 21


def test_old_lengths_fade() -> None:
    estimates, call = Estimates(LoadIndex().pace), completion(max_gen_length=1000)
    for _ in range(1000):
        estimates.learn(call, 8, usage(800))
    for _ in range(300):
        estimates.learn(call, 8, usage(20))
    assert estimates.output_tokens(call) < 100


def test_the_number_of_functions_is_limited() -> None:
    estimates = Estimates(LoadIndex().pace)
    for number in range(10_000):
        estimates.learn(completion(f"template {number}", models=(str(number),)), 8, usage(50))
    assert len(estimates._functions) <= 4096
    assert len(estimates._ratios) <= 256
    assert estimates.output_tokens(completion("template 0", max_gen_length=1000)) == 501


@fuzz(st.lists(st.integers(1, 10_000)), st.integers(1, 5000), st.floats(0, 1))
def test_a_mean_is_between_the_observed_lengths(
    lengths: list[int], limit: int, share: float
) -> None:
    histogram, prior = OutputLengths(), share * limit
    for length in lengths:
        histogram.observe(length)
    cut = [prior, *(min(length, limit) for length in lengths)]
    expected = histogram.expect(prior, limit)
    assert min(cut) * 0.999 <= expected <= max(cut) * 1.001
    if len(lengths) < 64:  # No observation has faded. Only the bucket at the limit is inexact.
        assert expected == pytest.approx(sum(cut) / len(cut), rel=0.16)


def test_seconds_follow_the_lengths_that_are_known() -> None:
    estimates = Estimates(LoadIndex().pace)
    ready, ids, unknown = (SemanticVariable(n, n, 1) for n in "abc")
    ready.set("x" * 4000)
    ids.set("x" * 4000, TokenizedText("t", tuple(range(100))))
    plain = estimates.predict(completion("x" * 40)).seconds
    per_token = (estimates.predict(completion("x" * 80)).seconds - plain) / 10
    assert per_token == pytest.approx(StepCosts().prefill_s)
    assert estimates.predict(completion("x" * 40, ready)).seconds == pytest.approx(
        plain + 1000 * per_token
    )
    assert estimates.predict(completion("x" * 40, ids)).seconds == pytest.approx(
        plain + 100 * per_token
    )
    assert estimates.predict(completion("x" * 40, unknown)).seconds > plain
    assert estimates.predict(NATIVE).seconds < plain


def test_tokens_per_character_are_learned_per_set_of_models() -> None:
    estimates = Estimates(LoadIndex().pace)
    call = completion("x" * 400, models=("terse",), max_gen_length=10)
    for _ in range(200):
        estimates.learn(call, 400, usage(10, prompt=200))
    assert estimates.tokens_per_char(("terse",)) == pytest.approx(0.5, rel=0.01)
    assert estimates.tokens_per_char(()) == 0.25


def test_answers_without_token_counts_are_ignored() -> None:
    estimates, call = Estimates(LoadIndex().pace), completion(max_gen_length=1000)
    before = estimates.predict(call).seconds
    estimates.learn(call, 8, Usage())
    assert estimates.predict(call).seconds == before
    estimates.learn(call, 0, usage(500))  # No times and an empty prompt.
    assert estimates.predict(call).seconds == pytest.approx(before, rel=0.01)


def test_seconds_depend_on_the_load_and_work_does_not() -> None:
    pace = [Pace(0.001, 0.01, 0.01)]
    estimates = Estimates(lambda models: pace[-1])
    call = completion(max_gen_length=100, ignore_tokenizer_eos=True)
    alone = estimates.predict(call)
    assert alone.work_s == pytest.approx(0.001 * 0.25 * len("Do it: ") + 0.01 * 100)
    pace.append(Pace(0.001, 0.5, 0.01))
    assert estimates.predict(call).seconds == pytest.approx(alone.seconds + 100 * 0.49)
    assert estimates.predict(call).work_s == alone.work_s
    assert 0 < estimates.predict(NATIVE).work_s < 0.1
