"""Answers in vendors' formats match the OpenAPI page."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from parrot.server.app import create_app
from tests.gateway.vendors.conftest import MODEL, Site

MESSAGES = [{"role": "user", "content": "Hello"}]
SHORT = {"model": MODEL, "max_tokens": 4}


def described(site: Site, path: str) -> Draft202012Validator:
    page = create_app(site.core).openapi()
    content = page["paths"][path]["post"]["responses"]["200"]["content"]
    schema = content["application/json"]["schema"] | {"components": page["components"]}
    return Draft202012Validator(schema)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", SHORT | {"messages": MESSAGES, "n": 2}),
        ("/v1/completions", SHORT | {"prompt": ["a", "b"], "logprobs": 1}),
        ("/v1/messages", SHORT | {"messages": MESSAGES}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES}),
        ("/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 16}),
        ("/v1/responses/input_tokens", {"model": MODEL, "input": "Hello"}),
        ("/tokenize", {"model": MODEL, "prompt": "Hello"}),
        ("/detokenize", {"model": MODEL, "tokens": [65, 66]}),
    ],
)
async def test_answers_match_their_description(site: Site, path: str, body: dict[str, Any]) -> None:
    validator = described(site, path)
    validator.validate(await site.post(path, body))
    assert not validator.is_valid({})


def test_what_may_stream_is_described(site: Site) -> None:
    paths = create_app(site.core).openapi()["paths"]
    streams = {
        (path, method)
        for path in paths
        for method, operation in paths[path].items()
        if "text/event-stream" in operation["responses"]["200"]["content"]
    }
    assert streams == {
        ("/v1/chat/completions", "post"),
        ("/v1/completions", "post"),
        ("/v1/messages", "post"),
        ("/v1/responses", "post"),
        ("/v1/responses/{response_id}", "get"),
        ("/v1/semantic_var/{var_id}/stream", "get"),
    }
