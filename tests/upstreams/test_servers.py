"""ServeCore in front of servers that it calls directly. Real HTTP and fake servers."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response

from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.utils.config import ConfigError, parse_config
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.upstreams.conftest import core_of


async def test_every_model_of_a_server_can_be_called() -> None:
    fake = FakeOpenAI(models=("gpt-fake", "other"), owned_by="vllm", max_model_len=1234)
    async with serve_app(fake.app()) as url, core_of({"url": f"{url}/v1"}) as client:
        await client.until_served("gpt-fake", "other")
        status, answer = await client.ask("other")
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "one two three")
        assert fake.bodies[-1]["model"] == "other"
        assert {card.max_model_len for card in client.core.models().data} == {1234}


async def test_the_model_list_of_the_server_is_followed() -> None:
    fake = FakeOpenAI(models=("a", "b"))
    async with serve_app(fake.app()) as url, core_of({"url": f"{url}/v1"}) as client:
        await client.until_served("a", "b")
        fake.models = ("b", "lora")
        await client.until_served("b", "lora")
        assert (await client.ask("lora"))[0] == 200
        status, answer = await client.ask("never")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_only_the_wanted_models_are_served() -> None:
    fake = FakeOpenAI(models=("a", "b"))
    async with (
        serve_app(fake.app()) as url,
        core_of({"url": f"{url}/v1", "models": ["b", "not there"]}) as client,
    ):
        await client.until_served("b")


async def test_a_changed_model_is_registered_again() -> None:
    fake = FakeOpenAI(max_model_len=50)
    async with serve_app(fake.app()) as url, core_of({"url": f"{url}/v1"}) as client:
        await client.until_served("gpt-fake")
        (old,) = client.core.fleet.engines
        fake.models_status = 503  # like a server that is loading its model
        await asyncio.sleep(0.1)
        assert list(client.core.fleet.engines) == [old]  # The list is only unknown.
        fake.models_status = 200
        await asyncio.sleep(0.1)
        assert list(client.core.fleet.engines) == [old]  # The model is the same.
        fake.max_model_len = 99  # like after a restart with another option
        async with asyncio.timeout(20):
            while old in client.core.fleet.engines or not client.num_engines:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (card,) = client.core.models().data
        assert card.max_model_len == 99


async def test_calls_move_to_another_server_of_the_pool() -> None:
    """The first server stops answering. Its engine is lost, and both calls run on the second."""
    first, second = FakeOpenAI(reply="from the first"), FakeOpenAI(reply="from the second")
    async with AsyncExitStack() as stack:
        dying = AsyncExitStack()
        urls = [
            await dying.enter_async_context(serve_app(first.app())),
            await stack.enter_async_context(serve_app(second.app())),
        ]
        entries = [{"url": f"{url}/v1"} for url in urls]
        client = await stack.enter_async_context(core_of(*entries))
        await client.until_served("gpt-fake", times=2)
        await dying.aclose()
        answers = await asyncio.gather(*(client.ask() for _ in range(4)))
        texts = {answer["choices"][0]["message"]["content"] for _, answer in answers}
        assert texts == {"from the second"}


async def test_errors_of_the_server_reach_the_client() -> None:
    fake = FakeOpenAI(faults=[Fault(401, {"error": {"message": "no"}})] * 3)
    async with serve_app(fake.app()) as url, core_of({"url": f"{url}/v1"}) as client:
        await client.until_served("gpt-fake")
        status, answer = await client.ask()
        assert (status, "API key" in answer["error"]["message"]) == (502, True)
        assert fake.faults == []
        assert (await client.ask())[0] == 200


async def test_the_key_comes_from_a_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-of-the-server\n")
    fake = FakeOpenAI()
    async with (
        serve_app(fake.app()) as url,
        core_of({"url": f"{url}/v1", "engine": {"instance": {"api_key_file": str(key)}}}) as client,
    ):
        await client.until_served("gpt-fake")
        await client.ask()
        assert fake.headers[-1]["authorization"] == "Bearer secret-of-the-server"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Create a self-signed certificate of localhost and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    options = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *options], check=True, capture_output=True)
    return cert, key


async def test_a_private_certificate_authority_is_trusted(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    fake = FakeOpenAI()
    async with serve_app(fake.app(), ssl_certfile=cert, ssl_keyfile=key) as url:
        secure = url.replace("http://127.0.0.1", "https://localhost") + "/v1"
        trusting = {"url": secure, "engine": {"instance": {"ca_file": str(cert)}}}
        async with core_of(trusting) as client:
            await client.until_served("gpt-fake")
            assert (await client.ask())[0] == 200
        async with core_of({"url": secure}) as client:
            await asyncio.sleep(0.2)
            assert await client.models() == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"url": "localhost:8000"}, "must be a URL"),
        ({"url": "http://user:password@h/v1"}, "must have no user name"),
        ({"url": "http://h:99999/v1"}, "Port out of range"),
        ({"url": "http://h/a b/v1"}, "'http://h/a b/v1' must have no blanks"),
        ({"url": "http://h/v1", "engine": {"nonsuch": 1}}, "unknown key `nonsuch`"),
        ({"url": "http://h/v1", "engine": {"engine_type": "sim"}}, "`engine_type` is made from"),
        (
            {"url": "http://h/v1", "engine": {"instance": {"api_key_file": "/none"}}},
            "cannot read /none",
        ),
        ({"url": "https://h/v1", "engine": {"instance": {"ca_file": "/none"}}}, "/none"),
        ({"url": "https://api.openai.com/v1"}, "OPENAI_API_KEY"),
    ],
)
def test_a_bad_entry_ends_the_start(
    entry: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        create_app(ServeCore(parse_config(CoreConfig, {"servers": [entry]}, "test")))


def test_a_server_may_be_named_once() -> None:
    entries = [{"url": "http://h/v1"}, {"url": "http://h/v1/"}]
    with pytest.raises(ConfigError, match="http://h/v1 is named twice"):
        parse_config(CoreConfig, {"servers": entries}, "test")


def test_without_servers_the_package_is_not_imported() -> None:
    code = (
        "import sys; from parrot.serve.config import CoreConfig; "
        "from parrot.serve.core import ServeCore; from parrot.server.app import create_app; "
        "create_app(ServeCore(CoreConfig())); "
        "assert not [m for m in sys.modules if m.startswith(('parrot.upstreams', 'parrot.engine'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class SmallContext(FakeOpenAI):
    """Refuses limits above its context, as vLLM does."""

    def _next_fault(self) -> Fault | None:
        limit = self.bodies[-1].get("max_tokens")
        if limit is None or limit <= 2048:
            return None
        text = f"max_tokens={limit} cannot be greater than max_model_len=2048."
        return Fault(400, {"error": {"message": text, "type": "BadRequestError", "code": 400}})


async def test_a_limit_above_the_context_of_the_server_is_omitted() -> None:
    fake = SmallContext(max_model_len=2048)
    async with serve_app(fake.app()) as url, core_of({"url": f"{url}/v1"}) as client:
        await client.until_served("gpt-fake")
        for limit, sent in ((None, [None]), (100, [100]), (32_000, [32_000, None])):
            fake.bodies.clear()
            assert (await client.ask(max_tokens=limit))[0] == 200
            assert [body.get("max_tokens") for body in fake.bodies] == sent


class FailsInStreams(FakeOpenAI):
    """Sends an empty stream instead of an error, as llama-cpp-python does."""

    def _next_fault(self) -> Fault | None:
        if self.bodies[-1].get("stream"):
            return Fault(after_chunks=-1)
        text = "This model's maximum context length is 2048 tokens."
        code = {"message": text, "code": "context_length_exceeded"}
        return Fault(400, {"error": code})

    async def _events(
        self, body: Mapping[str, Any], is_chat: bool, fault: Fault | None
    ) -> AsyncIterator[bytes]:
        return
        yield


async def test_an_empty_stream_is_explained() -> None:
    fake = FailsInStreams(owned_by="me")
    async with serve_app(fake.app()) as url, core_of({"url": f"{url}/v1"}) as client:
        await client.until_served("gpt-fake")
        status, answer = await client.ask()
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer
        assert len(fake.bodies) == 2


class CutsOff(FakeOpenAI):
    """Ends its answer when any other request comes, as llama-cpp-python does."""

    num_lists = 0

    async def _models(self) -> Response:
        self.num_lists += 1
        return await super()._models()

    async def _events(
        self, body: Mapping[str, Any], is_chat: bool, fault: Fault | None
    ) -> AsyncIterator[bytes]:
        before = self.num_lists
        async for event in super()._events(body, is_chat, fault):
            if self.num_lists > before:
                yield b"data: [DONE]\n\n"
                return
            yield event


async def test_an_answer_is_not_cut_off_by_reading_the_model_list() -> None:
    fake = CutsOff(owned_by="me", reply="a b c d e f", word_s=0.05)
    async with serve_app(fake.app()) as url, core_of({"url": f"{url}/v1"}) as client:
        await client.until_served("gpt-fake")
        assert await client.said() == "a b c d e f"
        assert len(fake.bodies) == 1


@pytest.mark.parametrize(("owner", "is_sent"), [("vllm", True), ("me", False)])
async def test_request_ids_are_sent_to_servers_that_accept_any(owner: str, is_sent: bool) -> None:
    """llama-cpp-python (`me`) answers 400 to an id that is not a UUID."""
    fake = FakeOpenAI(owned_by=owner)
    async with serve_app(fake.app()) as url, core_of({"url": f"{url}/v1"}) as client:
        await client.until_served("gpt-fake")
        assert (await client.ask())[0] == 200
        assert ("x-request-id" in fake.headers[-1]) == is_sent
