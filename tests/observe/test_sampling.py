"""OpenTelemetry's samplers select the exported traces."""

from collections.abc import Mapping

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from hypothesis import given
from hypothesis import strategies as st

from parrot.serve.config import CoreConfig
from parrot.server.serving import serving
from parrot.utils.config import ConfigError
from parrot.utils.spans import sampler_of
from parrot.utils.traceparent import SessionSpans, TraceParent, new_trace_id

IDS = st.binary(min_size=16, max_size=16).filter(any).map(bytes.hex)
CALLER = "cd" * 8


# The ids of the first and the last trace that a ratio sampler selects.
LOW, HIGH = f"{1:032x}", "f" * 32


@pytest.mark.parametrize(
    ("environ", "taken", "follows_callers"),
    [
        ({}, [LOW, HIGH], True),
        ({"OTEL_TRACES_SAMPLER": ""}, [LOW, HIGH], True),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, [LOW, HIGH], False),
        ({"OTEL_TRACES_SAMPLER": "always_off", "OTEL_TRACES_SAMPLER_ARG": "?"}, [], False),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            [LOW],
            False,
        ),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, [], True),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, [LOW, HIGH], True),
    ],
)
def test_the_environment_names_a_sampler(
    environ: Mapping[str, str], taken: list[str], follows_callers: bool
) -> None:
    sampler = sampler_of(None, environ)
    assert [one for one in (LOW, HIGH) if sampler.takes(one, None)] == taken
    for trace_id in (LOW, HIGH):
        for is_sampled in (True, False):
            caller = TraceParent(trace_id, CALLER, is_sampled)
            wanted = is_sampled if follows_callers else trace_id in taken
            assert sampler.takes(trace_id, caller) == wanted
            assert sampler.judged(caller) == caller._replace(is_sampled=wanted)
            assert sampler.trace_of(str(caller)) == (trace_id if wanted else "")
    assert [one for one in (LOW, HIGH) if sampler_of(0.5, environ).takes(one, None)] == [LOW]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"OTEL_TRACES_SAMPLER": "jaeger_remote"},
            "OTEL_TRACES_SAMPLER: 'jaeger_remote' is not one of",
        ),
        *(
            (
                {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": text},
                "OTEL_TRACES_SAMPLER_ARG: .* is not a number from 0 to 1",
            )
            for text in ("all", "-0.1", "1.5", "nan", "inf")
        ),
    ],
)
async def test_an_unknown_sampler_is_rejected(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], message: str
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=message):
        async with serving(CoreConfig(otlp_endpoint="http://localhost:4318/v1/traces")):
            pass


@given(IDS, IDS, st.integers(0, 2**45), st.lists(st.integers(1, 2**40), unique=True))
def test_spans_of_a_session_have_ids_of_their_own(
    trace_id: str, other: str, session_id: int, tasks: list[int]
) -> None:
    """The span id that an engine receives is the id of the span that is exported later."""
    spans, again = (SessionSpans(trace_id, session_id) for _ in range(2))
    callers = ["", str(TraceParent(other, CALLER))]
    made = [spans.task(caller, task) for caller in callers for task in tasks]
    received = [again.header(caller, task) for caller in callers for task in tasks]
    assert received == [str(span) for span in made]
    assert len({spans.session, *made}) == 1 + len(set(callers)) * len(tasks) or trace_id == other


def test_a_session_that_is_not_sampled_has_spans_only_where_a_caller_has() -> None:
    spans = SessionSpans("", 1)
    unsampled = TraceParent(new_trace_id(), CALLER, False)
    assert spans.header("", 1) == ""
    assert spans.header(str(unsampled), 2).endswith("-00")
    assert not spans.is_joined
    assert spans.header(str(unsampled._replace(is_sampled=True)), 3).endswith("-01")
    assert spans.is_joined
    with pytest.raises(ValueError, match="not sampled"):
        _ = spans.session
