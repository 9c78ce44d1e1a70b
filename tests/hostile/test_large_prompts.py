"""Small calls whose prompts would have gigabytes are rejected before the server builds them."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import InvalidRequest, PromptTooLong
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CallParameter, SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.template import placeholder
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.build import MAX_PLACEHOLDERS
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app
from tests.support.fake_engine import fake_engine

NUM_USES = 2600
VALUE = "parrot " * 2_100_000  # 15 MB


@pytest.fixture
async def client() -> AsyncIterator[ServeClient]:
    engine = fake_engine("a")
    config, clock = CoreConfig(), MonotonicClock()
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda info: engine))
    await core.register_engine(RegisterRequest(engine_config=engine.info))
    async with serve_app(create_app(core)) as url, HttpClient(url) as http:
        yield ServeClient(http)
    core.check_integrity()


class Hashes:
    """Counts the hashed bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sha256 = hashlib.sha256

    def sha256(self, data: bytes = b"", **options: Any) -> Any:
        self.num_bytes += len(data)
        return self._sha256(data, **options)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    counter = Hashes()
    monkeypatch.setattr(hashlib, "sha256", counter.sha256)
    return counter


def call(scope: dict[str, Any], template: str, var_id: str | None) -> SemanticCallRequest:
    parameters = [CallParameter(name="y", is_output=True)]
    if var_id is not None:
        parameters.append(CallParameter(name="x", var_id=var_id))
    return SemanticCallRequest(**scope, template=template, parameters=parameters)


async def test_a_large_value_that_is_used_often_is_hashed_once_and_rejected(
    client: ServeClient, hashes: Hashes
) -> None:
    session = await client.create_session()
    scope = {"session_id": session.session_id, "session_auth": session.session_auth}
    var_id = await client.create_var(**scope, var_name="x", content=VALUE)
    template = placeholder("x") * NUM_USES + placeholder("y")
    made = await client.semantic_call(call(scope, template, var_id))
    (output,) = (info.var_id for info in made.param_info if info.is_output)
    with pytest.raises(PromptTooLong, match="characters; the limit is"):
        await client.get_var(**scope, var_id=output, timeout_s=60)
    assert hashes.num_bytes < 1.5 * len(VALUE)


async def test_a_conversation_is_not_hashed_again_in_each_turn(
    client: ServeClient, hashes: Hashes
) -> None:
    session = await client.create_session()
    scope = {"session_id": session.session_id, "session_auth": session.session_auth}
    var_id = await client.create_var(**scope, var_name="x", content="word " * 2000)
    request = call(scope, placeholder("x") + placeholder("y"), var_id)
    num_turns = 20
    for _ in range(num_turns):
        made = await client.semantic_call(request)
        (output,) = (info.var_id for info in made.param_info if info.is_output)
        await client.get_var(**scope, var_id=output, timeout_s=60)
        request = call(scope, "And?" + placeholder("y"), None)
        request = request.model_copy(update={"successor_of": made.request_id})
    assert hashes.num_bytes < 2 * len("word " * 2000) + 200 * num_turns**2


async def test_placeholders_are_bounded(client: ServeClient) -> None:
    session = await client.create_session()
    scope = {"session_id": session.session_id, "session_auth": session.session_auth}
    var_id = await client.create_var(**scope, var_name="x", content="a")
    most = placeholder("x") * (MAX_PLACEHOLDERS - 1) + placeholder("y")
    await client.semantic_call(call(scope, most, var_id))
    for num in (MAX_PLACEHOLDERS, 1_000_000):
        with pytest.raises(InvalidRequest, match="more than 4096 placeholders"):
            await client.semantic_call(call(scope, placeholder("x") * num + "{{y}}", var_id))
