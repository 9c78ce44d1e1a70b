"""The recorded requests of clients work with a ServeCore in front of another one.

`tests/foreign` tests servers of other projects. `tests/gateway/vendors` has the recordings."""

import aiohttp
import pytest

from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.utils.config import parse_config
from tests.gateway.vendors.scripted import KEY, scripted_core
from tests.gateway.vendors.test_transcripts import TRANSCRIPTS, replay
from tests.support.app_server import serve_app
from tests.upstreams.conftest import Client

CLIENTS = [
    "anthropic",
    "claude_code",
    "codex",
    "langchain",
    "openai2",
    "openai3",
    "openai_agents",
    "opencode",
    "pydantic_ai",
    "qwen_code",
]
# In front of a server, ServeCore has no tokenizer. The server has to reject unknown fields.
WITHOUT = {"prompts of tokens", "count tokens", "errors"}


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_gets_the_answers_of_the_server(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    requests = [request for request in transcript["requests"] if request["feature"] not in WITHOUT]
    assert requests
    async with (
        scripted_core(max_text=10**8) as (behind, engine),
        serve_app(create_app(behind)) as server,
    ):
        key = {"instance": {"api_key": KEY}}
        keys = {"api_keys": [KEY], "session_quota": {"text_bytes": transcript["max_text"]}}
        given = {"servers": [{"url": f"{server}/v1", "engine": key}], **keys}
        core = ServeCore(parse_config(CoreConfig, given, "test"))
        headers = {"authorization": f"Bearer {KEY}"}
        async with (
            serve_app(create_app(core)) as url,
            aiohttp.ClientSession(url, headers=headers) as http,
        ):
            await Client(http, core).until_served("tiny")
            await replay(http, requests, engine)
            core.check_integrity()
