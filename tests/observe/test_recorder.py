"""ServeCore's process records its requests if the configuration turns it on."""

import errno

import orjson
import pytest
from fastapi.testclient import TestClient

from parrot.observe.recorder import Recorder, TraceFile
from parrot.protocol.trace import AnyTraceEvent, SetLine, TraceText
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.server.http_server import main
from parrot.utils.clock import MonotonicClock
from tests.support.held_world import HeldWorld


async def test_reads_of_existing_values_and_equal_prefixes_are_recorded(tmp_path):
    path = tmp_path / "trace.jsonl"
    sink = TraceFile(str(path))
    clock = MonotonicClock()
    config = CoreConfig(api_keys=("secret", "other"))
    core = ServeCore(config, clock=clock, sinks=[Recorder(sink, clock).sink])
    with TestClient(create_app(core), base_url="http://localhost") as client:
        scope = client.post("/v1/session", json={"api_key": "secret"}).json()
        ids = []
        for content in ("x" * 600, "x" * 300, "b"):
            body = scope | {"var_name": "v", "content": content}
            ids.append(client.post("/v1/semantic_var", json=body).json()["var_id"])
        answer = client.get(f"/v1/semantic_var/{ids[2]}", params=scope)
        assert answer.json()["content"] == "b"
        key = {"idempotency_key": "once"}
        call = scope | {"template": "{{x}} {{y}}", "parameters": []} | key
        call |= {"chat": True, "system": "a secret"}
        call["parameters"] = [{"name": "x", "value": "b"}, {"name": "y", "is_output": True}]
        for _ in range(2):
            assert client.post("/v1/semantic_call", json=call).status_code == 200
    sink.close()
    content = path.read_bytes()
    assert b"secret" not in content
    assert b"xxx" not in content  # ids are hexadecimal, so this is not part of one
    events = [orjson.loads(line) for line in content.splitlines()]
    kinds = ["trace", "session", *["variable"] * 3, "read", "answer", "call", "end", "ended"]
    assert [event["event"] for event in events] == kinds
    long, short, other = (event["value"]["ids"] for event in events[2:5])
    assert len(long) == 3
    assert len(short) == 2
    assert long[0] == short[0]
    assert not set(long[1:]) & set(short[1:])
    assert events[7]["parameters"][0]["value"]["ids"] == other
    assert events[8]["calls"][0]["state"] == "cancelled"


def test_a_trace_that_cannot_be_written_stops_the_server_at_its_start(tmp_path):
    config = tmp_path / "core.json"
    config.write_text(orjson.dumps({"port": 0, "trace_path": str(tmp_path / "no" / "t")}).decode())
    with pytest.raises(SystemExit, match="trace_path"):
        main(["--config_path", str(config)])


async def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, caplog):
    class FullDisk(TraceFile):
        """A disk with space for the header, an engine and the start of one session."""

        num_left = 3

        def __call__(self, event: AnyTraceEvent) -> None:
            self.num_left -= 1
            if self.num_left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().__call__(event)

    sink = FullDisk(str(tmp_path / "trace.jsonl"))
    world = await HeldWorld.open(sinks=[Recorder(sink, MonotonicClock()).sink])
    x = world.variable("x", "text")
    y = world.call("y", x)
    reading = world.read(y)
    await world.settle()
    await world.finish("y", "answer")
    assert await reading == "answer"
    deltas = [delta async for delta in world.core.stream(world.request(), y)]
    assert deltas == ["answer"]
    world.core.cancel_var(*world.scope.values(), y)
    world.core.delete_session(*world.scope.values())
    await world.core.close()
    sink.close()
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    assert "Recorder._variable_created failed; its sink receives no more events" in caplog.text
    assert "No space left" in caplog.text


def test_a_trace_whose_end_cannot_be_written_is_closed(caplog):
    sink = TraceFile("/dev/full")
    sink(SetLine(at=0.0, session_id=1, var_id="x", value=TraceText(chars=0, ids=[])))
    sink.close()
    assert "the end of the trace is lost" in caplog.text
