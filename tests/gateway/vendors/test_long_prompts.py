"""The error for a prompt that is too long has the wording that vendors' clients parse."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import fake_engine

LIMIT = 64
LONG = "a b c " * 40
CHAT = {"messages": [{"role": "user", "content": LONG}]}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve(CoreConfig(), fake_engine("e0", model=MODEL, max_seq_len=LIMIT)) as site:
        yield site


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/responses", {"input": LONG}, "input"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_error(
    site: Site, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    status, answer = await site.send(path, {"model": MODEL, "stream": stream} | body)
    error = answer["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    found = re.fullmatch(
        rf"This model's maximum context length is {LIMIT} tokens. However, your {param} resulted "
        rf"in (?:at least )?(\d+) tokens. Please reduce the length of the {param}.",
        error["message"],
    )
    assert found is not None, error["message"]
    assert int(found[1]) >= LIMIT


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_error(site: Site, stream: bool) -> None:
    asked = {"model": MODEL, "max_tokens": 5, "stream": stream} | CHAT
    status, answer = await site.send("/v1/messages", asked)
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    found = re.fullmatch(
        rf"prompt is too long: (?:at least )?(\d+) tokens > {LIMIT - 1} maximum", error["message"]
    )
    assert found is not None, error["message"]
    assert int(found[1]) >= LIMIT
