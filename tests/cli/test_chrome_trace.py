"""The Perfetto trace of a session."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from parrot.gateway.page.chrome_trace import chrome_trace
from parrot.protocol.public import CompletionInfo, GraphEdge, SessionInfo


def call(number: int, **fields: Any) -> CompletionInfo:
    names = {"func_name": "f", "output": f"out{number}", "output_var_id": f"v{number}"}
    return CompletionInfo(request_id=number, state="done", **(names | fields))


def session(calls: list[CompletionInfo], *edges: tuple[str, str]) -> SessionInfo:
    return SessionInfo(
        session_id=1,
        state="active",
        age_s=100.0,
        expires_in_s=0.0,
        vars=[],
        calls=calls,
        edges=[GraphEdge(source=a, target=b, variable="x") for a, b in edges],
    )


def test_a_chain() -> None:
    first = call(1, engine="a", ready_s=0.0, started_s=0.5, finished_s=2.0, decode_s=1.0)
    second = call(2, engine="b", ready_s=2.0, started_s=2.0, finished_s=3.0)
    waits = call(3)
    trace = chrome_trace(session([second, first, waits], ("v1", "v2"), ("v2", "v3")))
    json.dumps(trace)
    events = trace["traceEvents"]
    slices = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("f → out1", 0, 0, 2_000_000),
        ("queue", 0, 0, 500_000),
        ("prefill", 0, 500_000, 500_000),
        ("decode", 0, 1_000_000, 1_000_000),
        ("f → out2", 1, 2_000_000, 1_000_000),
    ]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["a", "b"]
    assert [(e["ph"], e["pid"], e["ts"]) for e in events if "cat" in e] == [
        ("s", 0, 2_000_000),
        ("f", 1, 2_000_000),
    ]


def test_running_calls_last_until_now() -> None:
    (event, *_) = chrome_trace(session([call(1, started_s=40.0)]))["traceEvents"]
    assert (event["ts"], event["dur"]) == (40_000_000, 60_000_000)


times = st.none() | st.floats(0, 100)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), times, times, times, times)))
def test_no_lane_has_two_calls_at_once(rows: list[tuple[Any, ...]]) -> None:
    keys = ("engine", "ready_s", "started_s", "finished_s", "decode_s")
    calls = [call(n, **dict(zip(keys, row, strict=True))) for n, row in enumerate(rows)]
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in chrome_trace(session(calls))["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            if event["args"]:
                lane = lanes.setdefault((event["pid"], event["tid"]), [])
                lane.append((event["ts"], event["ts"] + event["dur"]))
            else:  # Inside its call.
                begin, end = lane[-1]
                assert begin - 1 <= event["ts"] <= event["ts"] + event["dur"] <= end + 1
    for spans in lanes.values():
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(spans))
