"""The spans of a session, of its caller and of its engines."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

import aiohttp
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, TraceFlags

from parrot.cluster.ports import free_port
from parrot.engine.traces import EngineTracer
from parrot.observe.tracer import Tracer
from parrot.protocol.public import SessionCreateRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.server.serving import serving
from parrot.utils.clock import MonotonicClock
from parrot.utils.spans import SpanExport, sampler_of
from parrot.utils.traceparent import TraceParent, current_traceparent, new_trace_id, span_id_of
from tests.observe.program import over_http, write_and_review
from tests.support.app_server import serve_app

CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


class Traced:
    """ServeCore and an engine over HTTP, with recorded spans. If `ratio` is None, there is no
    sampler."""

    def __init__(self, ratio: float | None = 1.0) -> None:
        self.exporter, self.engine_exporter = InMemorySpanExporter(), InMemorySpanExporter()
        clock, sampler = MonotonicClock(), None if ratio is None else sampler_of(ratio, {})
        self.tracer = Tracer(SpanExport(self.exporter, "parrot"), clock)
        self.core = ServeCore(CoreConfig(), clock=clock, sinks=[self.tracer.sink], sampler=sampler)
        export = SpanExport(self.engine_exporter, "e")
        self.engine_tracer = EngineTracer(export, "e", "m", sampler_of(None, {}))

    async def run(self, caller: str | None = None) -> dict[str, Any]:
        """Run the program, and return the view of its session."""
        headers = {"traceparent": caller} if caller else {}
        async with over_http(self.core, self.engine_tracer, headers) as client:
            scope = await write_and_review(client, ["essay"])
            seen = (await client.session_info(**scope)).model_dump()
            await client.delete_session(**scope)
        await asyncio.to_thread(self.close)
        return seen

    def close(self) -> None:
        self.tracer.close()
        self.engine_tracer.close()

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        exporters = (self.exporter, self.engine_exporter)
        return [span for one in exporters for span in one.get_finished_spans()]

    def named(self, name: str) -> ReadableSpan:
        (span,) = (span for span in self.spans if span.name == name)
        return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


async def test_the_spans_are_the_graph() -> None:
    traced = Traced()
    seen = await traced.run()
    root = traced.named("invoke_workflow essay")
    assert root.parent is None
    assert root.context is not None
    by_request = {
        attributes(span)["parrot.request_id"]: span
        for span in traced.spans
        if parent_id(span) == root.context.span_id
    }
    assert {request: span.name for request, span in by_request.items()} == {
        call["request_id"]: f"{'execute_tool' if call['kind'] == 'native' else 'text_completion'} "
        f"{call['func_name']}"
        for call in seen["calls"]
    }
    made_by = {call["output_var_id"]: call["request_id"] for call in seen["calls"]}
    assert {
        (link.context.span_id, request)
        for request, span in by_request.items()
        for link in span.links
    } == {
        (by_request[made_by[edge["source"]]].context.span_id, made_by[edge["target"]])
        for edge in seen["edges"]
    }
    assert len({span.context.trace_id for span in traced.spans if span.context}) == 1


async def test_a_completion_span_has_its_waits_and_its_engine_span() -> None:
    traced = Traced()
    await traced.run()
    write, review = traced.named("text_completion write"), traced.named("text_completion review")
    for span in (write, review):
        facts = attributes(span)
        parts = ("dependency", "queue", "prefill", "decode")
        waits = [facts[f"parrot.{part}_s"] for part in parts]
        assert span.start_time is not None
        assert span.end_time is not None
        assert sum(waits) == pytest.approx((span.end_time - span.start_time) / 1e9, abs=1e-5)
        assert [event.name for event in span.events] == ["ready", "started", "first_token"]
        assert facts["gen_ai.operation.name"] == "text_completion"
        assert facts["gen_ai.response.model"] == "m"
        assert facts["gen_ai.usage.output_tokens"] == 5
        assert facts["gen_ai.response.finish_reasons"] == ["length"]
        assert facts["parrot.attempts"] == 1
    assert attributes(write)["parrot.dependency_s"] < attributes(review)["parrot.dependency_s"]
    below = {parent_id(span) for span in traced.spans if span.name == "generate m"}
    assert write.context is not None
    assert review.context is not None
    assert below == {write.context.span_id, review.context.span_id}
    tool = traced.named("execute_tool join")
    assert attributes(tool)["gen_ai.tool.name"] == "join"


async def test_no_text_is_in_a_span() -> None:
    traced = Traced()
    await traced.run()
    told = "".join(span.to_json() for span in traced.spans)
    for text in ("sea", "Write it", "Review it", "def join"):
        assert text not in told


async def test_the_trace_is_that_of_the_caller() -> None:
    traced = Traced()
    await traced.run(CALLER)
    root = traced.named("invoke_workflow essay")
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "cd" * 8
    assert {f"{span.context.trace_id:032x}" for span in traced.spans if span.context} == {"ab" * 16}


@pytest.mark.parametrize("caller", [CALLER[:-1] + "0"])
async def test_the_sampling_decision_of_the_caller_is_respected(caller: str) -> None:
    traced = Traced()
    await traced.run(caller)
    assert not traced.spans


async def test_no_span_is_made_of_a_trace_that_is_not_sampled_unless_its_caller_samples() -> None:
    for caller, num_spans in ((None, 0), (CALLER, 6)):
        traced = Traced(0.0)
        await traced.run(caller)
        assert len(traced.spans) == num_spans


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 0.0])
async def test_calls_of_vendors_clients_are_children_of_their_callers_spans(
    is_sampled: bool, ratio: float
) -> None:
    """The calls are in separate traces, although they belong to one program and one session."""
    traced = Traced(ratio)
    callers = [f"00-{n:032x}-{'cd' * 8}-0{is_sampled:d}" for n in (1, 2)]
    async with over_http(traced.core, traced.engine_tracer) as client:
        for caller in callers:
            request = {"model": "m", "prompt": f"After {caller}", "max_tokens": 3}
            await client._http.request(
                "POST",
                "/v1/completions",
                body=request | {"prompt_cache_key": "p"},
                traceparent=caller,
            )
        (session,) = traced.core.sessions
        traced.core.delete_session(session.id, session.auth)
    await asyncio.to_thread(traced.close)
    names = sorted(span.name for span in traced.spans)
    calls = ["generate m"] * 2 + ["text_completion completion"] * 2
    own = ["invoke_workflow p"] if ratio else []
    assert names == sorted([*(calls if is_sampled else ()), *own])
    for span in traced.spans:
        if span.name.startswith("text_completion"):
            assert parent_id(span) == int("cd" * 8, 16)
        if span.name == "generate m":
            (above,) = (
                s for s in traced.spans if s.context and s.context.span_id == parent_id(span)
            )
            assert above.context.trace_id == span.context.trace_id


async def test_without_an_exporter_engines_get_no_span() -> None:
    traced = Traced(None)
    await traced.run(CALLER)
    assert not traced.spans


@pytest.mark.parametrize(
    "header", ["", "00-x-y-01", "00-" + "0" * 32 + "-" + "cd" * 8 + "-01", "é", "0" * 5000]
)
async def test_an_invalid_header_is_ignored(header: str) -> None:
    core = ServeCore(CoreConfig(), sampler=sampler_of(1.0, {}))
    async with serve_app(create_app(core)) as url, aiohttp.ClientSession() as http:
        headers = {"traceparent": header}
        async with http.post(f"{url}/v1/session", json={}, headers=headers) as response:
            assert response.status == 200, await response.text()
    await core.close()


def test_the_callers_current_span_is_sent() -> None:
    assert current_traceparent() is None
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("mine") as span:
        parsed = TraceParent.parse(current_traceparent())
        assert parsed is not None
        assert int(parsed.span_id, 16) == span.get_span_context().span_id
        assert parsed.is_sampled
    assert trace.get_current_span().get_span_context().trace_flags == TraceFlags.DEFAULT


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8), st.booleans())
def test_a_traceparent_is_parsed(trace_id: bytes, span: bytes, flag: bool) -> None:
    one = TraceParent(trace_id.hex(), span.hex(), flag)
    assert TraceParent.parse(str(one)) == (one if any(trace_id) and any(span) else None)


@given(st.text())
def test_any_text_can_be_parsed_as_a_traceparent(text: str) -> None:
    TraceParent.parse(text)


def send(export: SpanExport, name: str, **facts: Any) -> TraceParent:
    """Send a span of 1 s, and return its ids."""
    trace_id = new_trace_id()
    own = TraceParent(trace_id, span_id_of(trace_id, 1))
    export.send(name, own, None, (1.0, 2.0), {"a": None, "b": 1}, **facts)
    return own


class Refusing(InMemorySpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        raise OSError("connection refused")


def test_a_failed_export_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    export = SpanExport(Refusing(), "parrot")
    for _ in range(3):
        send(export, "x")
    export.close()
    assert "connection refused" in caplog.text


class Stuck(InMemorySpanExporter):
    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        self.free.wait(60)
        return super().export(spans)


def test_an_export_that_hangs_stops_neither_spans_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("parrot.utils.spans._FLUSH_S", 0.1)
    monkeypatch.setattr("parrot.utils.spans._MAX_QUEUED", 512)
    exporter = Stuck()
    export = SpanExport(exporter, "parrot")
    for _ in range(5000):
        send(export, "x")
    export.close()
    assert "the last spans could not be exported in 0.1 s" in caplog.text
    assert "Queue full" in caplog.text
    exporter.free.set()


def test_an_error_is_named() -> None:
    exporter = InMemorySpanExporter()
    export = SpanExport(exporter, "parrot")
    send(export, "x", error="engine_failed")
    export.close()
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span) == {"b": 1, "error.type": "engine_failed"}


async def collected(port: int, num_spans: int) -> list[Any]:
    """Run a collector until it has received this number of spans, and return them."""
    spans: list[Any] = []
    done = asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        parts = (part for one in sent.resource_spans for part in one.scope_spans)
        spans.extend(span for part in parts for span in part.spans)
        if len(spans) >= num_spans:
            done.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.wait_for(done.wait(), 60)
    finally:
        await runner.cleanup()
    return spans


async def test_spans_that_cannot_be_made_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(task: object) -> dict[str, Any]:
        raise ValueError("no such span")

    monkeypatch.setattr("parrot.observe.tracer._attributes", broken)
    traced = Traced()
    await traced.run()
    assert "no such span" in caplog.text
    assert traced.named("invoke_workflow essay")


async def test_a_collector_gets_them_over_http() -> None:
    port = free_port("127.0.0.1", set())
    receiving = asyncio.create_task(collected(port, 2))
    export = SpanExport.to(f"http://127.0.0.1:{port}/v1/traces", "parrot")
    await asyncio.sleep(0)
    linked = send(export, "first", error="engine_failed")
    events = [("ready", 1.5), ("never", None)]
    send(export, "second", links=[linked], events=events)
    await asyncio.to_thread(export.close)
    first, second = await receiving
    assert [first.name, second.name] == ["first", "second"]
    assert first.status.code == StatusCode.ERROR.value
    assert second.links[0].span_id.hex() == linked.span_id
    assert [event.name for event in second.events] == ["ready"]
    assert second.start_time_unix_nano == 1_000_000_000
    assert {a.key: a.value.int_value for a in second.attributes} == {"b": 1}


async def test_a_server_exports_the_spans_of_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # ms
    port = free_port("127.0.0.1", set())
    receiving = asyncio.create_task(collected(port, 1))
    await asyncio.sleep(0)
    config = CoreConfig(otlp_endpoint=f"http://127.0.0.1:{port}/v1/traces")
    async with serving(config) as server:
        session = server.core.create_session(SessionCreateRequest(apps=["essay"]))
        server.core.delete_session(session.session_id, session.session_auth)
        (span,) = await receiving
        await server.core.close()
    assert span.name == "invoke_workflow essay"


def test_without_the_extra_an_endpoint_is_an_error_of_the_configuration() -> None:
    program = """
import asyncio, sys
sys.modules["opentelemetry.sdk"] = None
from parrot.protocol.public import SessionCreateRequest
from parrot.serve.config import CoreConfig
from parrot.server.serving import serving
from parrot.utils.config import ConfigError
async def main():
    async with serving(CoreConfig(otlp_endpoint="http://localhost:4318/v1/traces")):
        print("serves")
try:
    asyncio.run(main())
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "otlp_endpoint: opentelemetry.sdk.trace is not installed: pip install" in done.stdout
    assert "[otel]" in done.stdout
