"""ServeCore's process records what it is asked, if its configuration says so."""

import orjson
import pytest
from fastapi.testclient import TestClient

from parrot.serve.api.app import create_app
from parrot.serve.config import CoreConfig
from parrot.serve.http_server import main
from parrot.serve.recorder import TraceFile, TracingCore


async def test_values_that_are_there_are_reads_too_and_ids_tell_equal_beginnings(tmp_path):
    path = tmp_path / "trace.jsonl"
    sink = TraceFile(str(path))
    core = TracingCore(CoreConfig(api_keys=("secret", "other")), sink=sink)
    with TestClient(create_app(core)) as client:
        scope = client.post("/v1/session", json={"api_key": "secret"}).json()
        ids = []
        for content in ("x" * 600, "x" * 300, "b"):
            body = scope | {"var_name": "v", "content": content}
            ids.append(client.post("/v1/semantic_var", json=body).json()["var_id"])
        answer = client.get(f"/v1/semantic_var/{ids[2]}", params=scope)
        assert answer.json() == {"content": "b"}
        key = {"idempotency_key": "once"}
        call = scope | {"template": "{{x}} {{y}}", "parameters": []} | key
        call["parameters"] = [{"name": "x", "value": "b"}, {"name": "y", "is_output": True}]
        for _ in range(2):
            assert client.post("/v1/semantic_call", json=call).status_code == 200
    sink.close()
    content = path.read_bytes()
    assert b"secret" not in content
    assert b"xxx" not in content  # ids are hexadecimal: never by chance
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
