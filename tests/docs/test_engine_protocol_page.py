"""The examples of docs/internals/engine_protocol.md match the real requests and answers."""

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

import parrot.protocol.errors as errors
from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import SimConfig
from parrot.engine.sim import SimService
from parrot.protocol import engine_api
from parrot.protocol.endpoint import rules
from parrot.protocol.http import HttpClient
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app

PAGE = (Path(__file__).parents[2] / "docs" / "internals" / "engine_protocol.md").read_text()
OF_SERVE_CORE = {"/register_engine", "/engine_heartbeat", "/engine_leave"}
EXCHANGES: dict[str, tuple[str | None, str | dict[str, str]]] = {
    "/register_engine": ("RegisterRequest", "RegisterResponse"),
    "/engine_heartbeat": ("HeartbeatRequest", "HeartbeatResponse"),
    "/engine_leave": ("LeaveRequest", "LeaveResponse"),
    "/fill": ("FillRequest", "FillResponse"),
    "/generate": ("GenerateRequest", "GenerateResponse"),
    "/generate_stream": ("GenerateRequest", {"chunk": "StreamChunk", "done": "GenerateResponse"}),
    "/free_context": ("FreeContextRequest", "FreeContextResponse"),
    "/ping": (None, "PingResponse"),
    "/tokenizer": (None, "TokenizerResponse"),
    "/follow": ("FollowRequest", {"chunk": "StreamChunk", "done": "FollowResponse"}),
    "/channel": ("ChannelRequest", {"chunks": "ChannelChunks"}),
    "/embed": ("EmbedRequest", "EmbedResponse"),
    "/score": ("ScoreRequest", "ScoreResponse"),
}
WITHOUT_BODIES = {"/health", "/ready", "/metrics"}
DESCRIPTION = "/openapi.json"
RUN_IN_ORDER = ("/ping", "/fill", "/generate", "/generate_stream", "/free_context")


class Section(NamedTuple):
    path: str
    text: str

    def example(self, name: str) -> tuple[str, str]:
        """Return the language and the text of the block after `Request:` or `Response:`."""
        ((language, text),) = re.findall(
            rf"^{name}:\n\n```(\w+)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL
        )
        return language, text

    @property
    def request(self) -> Any:
        return json.loads(self.example("Request")[1])


def sections() -> Iterator[Section]:
    for part in re.split(r"^##+ ", PAGE, flags=re.MULTILINE):
        title, _, text = part.partition("\n")
        for path in re.findall(r"(?:GET|POST) (/\w+)", title):
            yield Section(path, text)


SECTIONS = {section.path: section for section in sections()}
WITH_BODIES = [section for path, section in SECTIONS.items() if path in EXCHANGES]


def test_every_endpoint_has_a_section() -> None:
    service, reorder = SimService(SimConfig()), ReorderBuffer(MonotonicClock())
    offered = {rule.path for rule in rules(create_app(service, reorder, SimConfig()).routes)}
    assert SECTIONS.keys() == offered - {DESCRIPTION} | OF_SERVE_CORE
    assert SECTIONS.keys() == EXCHANGES.keys() | WITHOUT_BODIES


@pytest.mark.parametrize("section", WITH_BODIES, ids=lambda section: section.path)
def test_examples_are_valid(section: Section) -> None:
    request, response = EXCHANGES[section.path]
    if request is not None:
        check(request, section.request)
    language, text = section.example("Response")
    if isinstance(response, str):
        assert language == "json"
        check(response, json.loads(text))
        return
    events = re.findall(r"^event: (\w+)\ndata: (.*)$", text, re.MULTILINE)
    assert response.keys() <= {name for name, _ in events}
    for name, data in events:
        if name in response:
            check(response[name], json.loads(data))
        else:
            assert json.loads(data) == {}


def check(name: str, example: Any) -> None:
    """Check that all fields were parsed. Misspelled fields cause no error, because servers ignore
    unknown fields."""
    model: type[BaseModel] = getattr(engine_api, name)
    read = model.model_validate(example)
    assert_covers(read.model_dump(mode="json", exclude_unset=True), example)


def assert_covers(read: Any, example: Any) -> None:
    if isinstance(example, dict):
        assert read.keys() >= example.keys()
        for key, value in example.items():
            assert_covers(read[key], value)
    elif isinstance(example, list):
        assert len(read) == len(example)
        for one, other in zip(read, example, strict=True):
            assert_covers(one, other)
    else:
        assert read == example


async def test_an_engine_runs_the_examples() -> None:
    service = SimService(config := SimConfig())
    await service.start()
    app = create_app(service, ReorderBuffer(MonotonicClock()), config)
    async with serve_app(app) as url, HttpClient(url) as http:
        for path in RUN_IN_ORDER:
            body = SECTIONS[path].request
            if path == "/generate_stream":
                *_, last = [event async for event in http.stream("POST", path, body=body)]
                assert last[0] == "done", last
            else:
                assert await http.request("POST", path, body=body)
    service.check_integrity()
    await service.close()


def test_the_table_of_statuses_is_right() -> None:
    known = {
        cls.type: cls.status
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.ParrotError)
    }
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert len(rows) > 10
    for status, name in rows:
        assert known[name] == int(status), name
    named = {int(status) for status, _ in rows}
    for section in WITH_BODIES:
        (listed,) = re.findall(r"Statuses: ([^.]*)\.", section.text) or [""]
        assert {int(code) for code in re.findall(r"\b[45]\d\d\b", listed)} <= named, section.path
    assert HTTPStatus.NOT_FOUND in named
