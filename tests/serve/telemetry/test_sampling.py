"""Which traces are exported: OpenTelemetry's samplers."""

from collections.abc import Mapping

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, set_span_in_context

from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.utils.config import ConfigError
from parrot.utils.span_sampling import Sampler, sampler_of
from parrot.utils.traceparent import SessionSpans, TraceParent, new_trace_id

IDS = st.binary(min_size=16, max_size=16).filter(any).map(bytes.hex)
CALLER = "cd" * 8


@given(IDS, st.floats(0, 1))
def test_a_ratio_decides_as_opentelemetry_does(trace_id: str, ratio: float) -> None:
    nobody = set_span_in_context(NonRecordingSpan(INVALID_SPAN_CONTEXT), Context())
    theirs = TraceIdRatioBased(ratio).should_sample(nobody, int(trace_id, 16), "a span")
    assert Sampler(ratio).takes(trace_id, None) == theirs.decision.is_sampled()


@pytest.mark.parametrize(
    ("environ", "share", "obeys_callers"),
    [
        ({}, 1.0, True),
        ({"OTEL_TRACES_SAMPLER": ""}, 1.0, True),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, 1.0, False),
        ({"OTEL_TRACES_SAMPLER": "always_off", "OTEL_TRACES_SAMPLER_ARG": "?"}, 0.0, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.25, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, 0.0, True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, 1.0, True),
    ],
)
def test_the_environment_names_a_sampler(
    environ: Mapping[str, str], share: float, obeys_callers: bool
) -> None:
    assert sampler_of(None, environ) == Sampler(share, obeys_callers)
    assert sampler_of(0.5, environ) == Sampler(0.5)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, "OTEL_TRACES_SAMPLER: 'jaeger_remote' is none"),
        *(
            (
                {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": text},
                "OTEL_TRACES_SAMPLER_ARG: .* is no number from 0 to 1",
            )
            for text in ("all", "-0.1", "1.5", "nan", "inf")
        ),
    ],
)
def test_a_sampler_that_nobody_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], message: str
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message):
        ServeCore(CoreConfig(otlp_endpoint="http://localhost:4318/v1/traces"))


@given(IDS, st.floats(0, 1), st.booleans(), st.booleans())
def test_a_callers_trace_is_joined_if_it_is_taken(
    trace_id: str, ratio: float, obeys: bool, is_sampled: bool
) -> None:
    sampler, caller = Sampler(ratio, obeys), TraceParent(trace_id, CALLER, is_sampled)
    is_taken = is_sampled if obeys else sampler.takes(trace_id, None)
    assert sampler.trace_of(str(caller)) == (trace_id if is_taken else "")
    assert sampler.judged(caller) == caller._replace(is_sampled=is_taken)


@given(IDS, IDS, st.integers(0, 2**45), st.lists(st.integers(1, 2**40), unique=True))
def test_spans_of_a_session_have_ids_of_their_own(
    trace_id: str, other: str, session_id: int, tasks: list[int]
) -> None:
    """What a task's engine is told names its span, which the exporter makes later."""
    spans, again = (SessionSpans(trace_id, session_id) for _ in range(2))
    callers = ["", str(TraceParent(other, CALLER))]
    made = [spans.task(caller, task) for caller in callers for task in tasks]
    told = [again.told(caller, task) for caller in callers for task in tasks]
    assert told == [str(span) for span in made]
    assert len({spans.session, *made}) == 1 + len(set(callers)) * len(tasks) or trace_id == other


def test_a_session_that_is_not_sampled_has_spans_only_where_a_caller_has() -> None:
    spans = SessionSpans("", 1)
    unsampled = TraceParent(new_trace_id(), CALLER, False)
    assert spans.told("", 1) == ""
    assert spans.told(str(unsampled), 2).endswith("-00")
    assert not spans.is_joined
    assert spans.told(str(unsampled._replace(is_sampled=True)), 3).endswith("-01")
    assert spans.is_joined
    with pytest.raises(ValueError, match="not sampled"):
        _ = spans.session
