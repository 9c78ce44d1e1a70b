"""The output of the demo and of `parrot ping` for fake session information."""

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from parrot.cli.calls import calls_table, queue_seconds, run_seconds
from parrot.cli.graph_picture import call_label, draw_session
from parrot.cli.run import engine_table
from parrot.protocol.public import CompletionInfo, EngineStatus, GraphEdge, SessionInfo


def call(request_id: int, **changes: object) -> CompletionInfo:
    fields = {
        "request_id": request_id,
        "func_name": "summarize",
        "output": "summary",
        "output_var_id": f"v{request_id}",
        "state": "done",
        "engine": "engine-0",
        "cached_tokens": 11,
        "computed_tokens": 200,
        "output_tokens": 30,
        "ready_s": 1.0,
        "started_s": 1.25,
        "finished_s": 3.5 + request_id,
    }
    return CompletionInfo.model_validate(fields | changes)


def session(*calls: CompletionInfo, edges: list[GraphEdge] | None = None) -> SessionInfo:
    return SessionInfo(
        session_id=1,
        state="active",
        age_s=9.0,
        expires_in_s=600.0,
        vars=[],
        calls=list(calls),
        edges=edges or [],
    )


def rendered(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


MAP_REDUCE = session(
    *(call(i) for i in range(3)),
    call(3, func_name="combine", computed_tokens=90),
    edges=[GraphEdge(source=f"v{i}", target="v3", variable="summary") for i in range(3)],
)


def test_table_has_a_row_per_call_and_the_total() -> None:
    text = rendered(calls_table(MAP_REDUCE, 12.34))
    assert text.count("summarize ") == 3
    row = next(line for line in text.splitlines() if "combine 3" in line)
    assert re.findall(r"[\d.]+", row)[1:] == ["0", "0.25", "11", "90", "30", "5.25"]
    total = next(line for line in text.splitlines() if "whole job" in line)
    assert re.findall(r"[\d.]+", total) == ["4", "44", "690", "120", "12.34"]
    assert "…" not in text, "the table fits 80 columns"


def test_rows_are_in_order_of_finishing_and_unfinished_calls_last() -> None:
    info = session(call(5), call(9, finished_s=None, state="running"), call(2))
    rows = re.findall(r"summarize (\d)", rendered(calls_table(info, 1.0)))
    assert rows == ["2", "5", "9"]
    assert "running" in rendered(calls_table(info, 1.0))


def test_outputs_of_a_call_with_several_are_named() -> None:
    info = session(call(1, output="joke"), call(1, output="why"), call(2))
    text = rendered(calls_table(info, 1.0))
    assert "summarize 1 → joke" in text
    assert "summarize 1 → why" in text
    assert "summarize 2 →" not in text


def test_seconds() -> None:
    assert run_seconds(call(0)) == 2.25
    assert run_seconds(call(0, finished_s=None)) is None
    assert queue_seconds(call(0)) == 0.25
    assert queue_seconds(call(0, started_s=None)) is None


SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_has_a_box_for_each_call_and_an_arrow_for_each_variable(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "graph.svg"
    draw_session(MAP_REDUCE, "A title & more", path)
    picture = ElementTree.parse(path).getroot()
    boxes = picture.findall(f"{SVG}rect[@rx]")
    arrows = picture.findall(f"{SVG}path")
    texts = [text.text for text in picture.findall(f"{SVG}text")]
    assert (len(boxes), len(arrows)) == (4, 3)
    assert texts[0] == "A title & more"
    assert texts[-2:] == ["combine → summary", "11 cached + 90 in, 30 out, 5.2 s"]
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    for box in boxes:
        x, y = float(box.attrib["x"]), float(box.attrib["y"])
        assert 0 < x < x + float(box.attrib["width"]) < width
        assert 0 < y < y + float(box.attrib["height"]) < height
    to_the_last = [arrow.attrib["d"].rpartition(" ")[2] for arrow in arrows]
    assert len(set(to_the_last)) == 1, "all arrows end at one box"


@pytest.mark.parametrize(
    "info",
    [
        session(),
        session(call(0, func_name="", output="<x_{1}> & \0 \\ é", state="failed", finished_s=None)),
        session(call(0), edges=[GraphEdge(source="unknown", target="v0", variable="x")]),
    ],
)
def test_unusual_sessions_are_drawn(tmp_path: Path, info: SessionInfo) -> None:
    draw_session(info, "", tmp_path / "graph.svg")
    ElementTree.parse(tmp_path / "graph.svg")


def test_labels_are_short() -> None:
    assert call_label(call(0, func_name="", output="x")) == "call → x"
    assert len(call_label(call(0, func_name="f" * 200))) == 36


def test_engine_table() -> None:
    engine = EngineStatus(
        engine_id=1,
        engine_name="e1",
        engine_type="sim",
        model="m",
        host="h",
        port=1,
        used_tokens=5,
        tokens_capacity=10,
    )
    text = rendered(engine_table([engine]))
    assert "h:1" in text
    assert "5 / 10" in text
