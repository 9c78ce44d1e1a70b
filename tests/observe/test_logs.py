"""The logs of both servers: facts of a program that they contain, and texts that they must not."""

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from parrot.observe.call_log import CallLog
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.utils.clock import MonotonicClock
from parrot.utils.logs import CALLS, JsonFormatter, TextFormatter
from tests.observe.program import over_http, semantic, write_and_review


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def with_message(self, message: str) -> list[dict[str, Any]]:
        logged = map(json.loads, self.texts)
        return [line for line in logged if line["message"] == message]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, before = Lines(), CALLS.level
    CALLS.addHandler(handler)
    CALLS.setLevel(logging.INFO)
    yield handler
    CALLS.removeHandler(handler)
    CALLS.setLevel(before)


async def test_calls_are_logged_with_their_ids_and_without_their_texts(lines: Lines) -> None:
    clock = MonotonicClock()
    core = ServeCore(CoreConfig(), clock=clock, sinks=[CallLog().sink])
    async with over_http(core) as client:
        scope = await write_and_review(client, ["essay"])
        info = await client.session_info(**scope)
        await client.delete_session(**scope)
    done = lines.with_message("call done")
    assert [(line["function"], line["request_id"]) for line in done] == [
        (call.func_name, call.request_id) for call in info.calls
    ]
    semantic = [line for line in done if line["function"] != "join"]
    served = lines.with_message("request ended")
    for ours, engines in zip(semantic, served, strict=True):
        for key in ("session_id", "call_id", "output_tokens", "computed_tokens"):
            assert ours[key] == engines[key], key
        assert ours["session_id"] == scope["session_id"]
        assert ours["seconds"] >= engines["seconds"]
    assert lines.with_message("session began")[0]["apps"] == ["essay"]
    assert lines.with_message("session ended")[0]["calls"] == 3
    for text in ("sea", "Write it", "Review it", "def join", scope["session_auth"]):
        assert text not in "".join(lines.texts)


async def test_a_call_that_fails_is_logged_with_the_type_of_its_error(lines: Lines) -> None:
    clock = MonotonicClock()
    core = ServeCore(CoreConfig(), clock=clock, sinks=[CallLog().sink])
    async with over_http(core) as client:
        scope = await write_and_review(client, [])
        await client.semantic_call(unread(scope))
        await client.delete_session(**scope)
    (line,) = lines.with_message("call cancelled")
    assert line["error"] == "session_gone"
    assert "seconds" not in line


def unread(scope: dict[str, Any]) -> Any:
    call = semantic(scope, "unread", "Nobody reads it.")
    return call.model_copy(update={"on_demand": True})


def record_of_failure() -> logging.LogRecord:
    try:
        raise ValueError("a secret prompt")
    except ValueError:
        info = sys.exc_info()
    return logging.LogRecord("x", logging.ERROR, __file__, 1, "%s failed", ("it",), info)


def test_json_contains_the_place_of_an_error_but_not_its_message() -> None:
    text = JsonFormatter().format(record_of_failure())
    line = json.loads(text)
    assert (line["level"], line["message"], line["error"]) == ("ERROR", "it failed", "ValueError")
    assert "record_of_failure" in line["raised"][0]
    assert "secret" not in text
    assert "\n" not in text


def test_text_has_the_facts_and_the_traceback() -> None:
    record = record_of_failure()
    record.facts = {"session_id": 7}
    text = TextFormatter().format(record)
    assert "ERROR x: it failed session_id=7\n" in text
    assert "Traceback" in text
