"""Behaviour that all vendors' endpoints share: errors, ids, models and CORS."""

import asyncio
from typing import Any

import pytest

from parrot.protocol.sampling import DefaultSampling
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import Script, fake_engine

OPENAI, ANTHROPIC = "/v1/chat/completions", "/v1/messages"


def is_openai(answer: Any) -> bool:
    return set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}


def is_anthropic(answer: Any) -> bool:
    return set(answer) == {"type", "error", "request_id"} and answer["type"] == "error"


async def test_models_in_both_vendors_formats(site: Site) -> None:
    async with site.http.get("/v1/models") as response:
        models = await response.json()
    (card,) = models["data"]
    assert (models["object"], card["object"], card["id"]) == ("list", "model", MODEL)
    assert card["owned_by"] == "parrot"
    assert card["created"] > 1_600_000_000
    assert card["max_model_len"] == site.engine.info.max_seq_len
    assert card["default_sampling"] == DefaultSampling(temperature=0.5, top_k=0).model_dump()
    assert card["architecture"] == "LlamaForCausalLM"
    assert (card["type"], card["display_name"]) == ("model", MODEL)
    assert card["created_at"].endswith("Z")
    assert (models["has_more"], models["first_id"], models["last_id"]) == (False, MODEL, MODEL)
    async with site.http.get(f"/v1/models/{MODEL}") as response:
        assert await response.json() == card
    async with site.http.head("/v1/models") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_a_model_with_a_path_as_its_name() -> None:
    async with serve(CoreConfig(), fake_engine("e0", model="org/tiny")) as site:
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
            async with site.http.get(path) as response:
                assert (await response.json())["id"] == "org/tiny"


async def test_unknown_models(site: Site) -> None:
    async with site.http.get("/v1/models/nope") as response:
        answer = await response.json()
        assert (response.status, is_openai(answer)) == (404, True)
        assert (answer["error"]["code"], answer["error"]["param"]) == ("model_not_found", "model")
    headers = {"anthropic-version": "2023-06-01"}
    async with site.http.get("/v1/models/nope", headers=headers) as response:
        answer = await response.json()
        assert (response.status, is_anthropic(answer)) == (404, True)
        assert answer["error"]["type"] == "not_found_error"
    messages = [{"role": "user", "content": "Hi"}]
    status, answer = await site.send(OPENAI, {"model": "nope", "messages": messages})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("method", "path", "status", "has_form"),
    [
        ("GET", OPENAI, 405, is_openai),
        ("DELETE", "/v1/completions", 405, is_openai),
        ("POST", "/v1/images/generations", 404, is_openai),
        ("GET", ANTHROPIC, 405, is_anthropic),
        ("POST", "/v1/messages/batches", 404, is_anthropic),
    ],
)
async def test_unknown_paths_and_methods(
    site: Site, method: str, path: str, status: int, has_form: Any
) -> None:
    async with site.http.request(method, path) as response:
        answer = await response.json()
        assert (response.status, has_form(answer)) == (status, True), answer
        if status == 405:
            assert response.headers["Allow"] == "POST"
        else:
            assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", '. Did you mean base_url="BASE/v1"?'),
        ("/models", '. Did you mean base_url="BASE/v1"?'),
        ("/v1/v1/messages", '. This client adds /v1 itself: use base_url="BASE"'),
        ("/v1/v1/chat/completions", '. This client adds /v1 itself: use base_url="BASE"'),
        ("/chat", ""),
        ("/v1/v1/chat", ""),
    ],
)
async def test_the_error_for_a_wrong_base_url_names_the_right_one(
    site: Site, path: str, hint: str
) -> None:
    status, answer = await site.send(path, {})
    base = str(site.http._base_url).rstrip("/")
    assert status == 404
    assert answer["error"]["message"] == f"Not found: {path}{hint.replace('BASE', base)}"


async def test_bodies_that_are_too_large() -> None:
    async with serve(CoreConfig(max_body_size=100), fake_engine("e0")) as site:
        status, answer = await site.send(OPENAI, {"x": "x" * 200})
        assert (status, is_openai(answer)) == (413, True)
        status, answer = await site.send(ANTHROPIC, {"x": "x" * 200})
        assert (status, is_anthropic(answer)) == (413, True)
        assert answer["error"]["type"] == "request_too_large"


async def test_parrots_own_paths_keep_their_form(site: Site) -> None:
    status, answer = await site.send("/v1/session", {"x": 1})
    assert (status, answer["error"]["type"]) == (422, "validation_failed")


async def test_every_answer_has_an_id(site: Site) -> None:
    ids = set()
    for path in ("/v1/models", OPENAI, ANTHROPIC, "/nope", "/health"):
        async with site.http.get(path) as response:
            ids.add(response.headers["x-request-id"])
            assert response.headers["request-id"] == response.headers["x-request-id"]
            if path == ANTHROPIC:
                assert (await response.json())["request_id"] == response.headers["request-id"]
    assert len(ids) == 5
    async with site.http.get("/health", headers={"x-request-id": "mine"}) as response:
        assert response.headers["x-request-id"] == "mine"


async def test_pages_of_other_origins_may_call_only_if_they_are_configured() -> None:
    page = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    asks = page | {"Access-Control-Request-Headers": "authorization,content-type"}
    async with serve(CoreConfig(), fake_engine("e0")) as site:
        async with site.http.options(OPENAI, headers=asks) as response:
            assert response.status == 405
        async with site.http.get("/v1/models", headers=page) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
    config = CoreConfig(cors_origins=("https://app.example",))
    async with serve(config, fake_engine("e0")) as site:
        async with site.http.options(OPENAI, headers=asks) as response:
            assert response.status == 200
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
        async with site.http.get("/v1/models", headers=page) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
            assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
        other = asks | {"Origin": "https://other.example"}
        async with site.http.options(OPENAI, headers=other) as response:
            assert response.status == 400


async def test_models_by_other_names() -> None:
    aliases = {"claude-haiku": MODEL, "gpt": MODEL, "lost": "not-served"}
    async with serve(CoreConfig(model_aliases=aliases), fake_engine("e0", model=MODEL)) as site:
        async with site.http.get("/v1/models") as response:
            names = [card["id"] for card in (await response.json())["data"]]
        assert names == [MODEL, "claude-haiku", "gpt"]
        async with site.http.get("/v1/models/gpt") as response:
            assert (await response.json())["max_model_len"] == site.engine.info.max_seq_len
        asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        for path in (OPENAI, ANTHROPIC):
            answer = await site.post(path, asked | {"model": "claude-haiku"})
            assert answer["model"] == "claude-haiku"
        asked.pop("max_tokens")
        counted = await site.post(f"{ANTHROPIC}/count_tokens", asked | {"model": "gpt"})
        assert counted["input_tokens"] > 0
        status, answer = await site.send(OPENAI, asked | {"model": "lost"})
        assert (status, "not-served" in answer["error"]["message"]) == (404, True)


async def test_tokens_and_their_text(site: Site) -> None:
    returned = await site.post("/tokenize", {"model": MODEL, "prompt": "Grün"})
    assert returned["count"] == len(returned["tokens"]) == len("Grün".encode())
    assert returned["max_model_len"] == site.engine.info.max_seq_len
    back = await site.post("/detokenize", {"model": MODEL, "tokens": returned["tokens"]})
    assert back == {"prompt": "Grün"}
    messages = [{"role": "user", "content": "Hi"}]
    returned = await site.post("/tokenize", {"model": MODEL, "messages": messages})
    answer = await site.post(OPENAI, {"model": MODEL, "messages": messages})
    assert returned["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400),
        ("/tokenize", {"prompt": "a", "model": "nope"}, 404),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
    ],
)
async def test_wrong_requests_for_tokens(
    site: Site, path: str, fields: dict[str, Any], status: int
) -> None:
    found, answer = await site.send(path, {"model": MODEL} | fields)
    assert (found, is_openai(answer)) == (status, True)
    found, answer = await site.send("/detokenize", {"model": MODEL, "tokens": [2**31 - 1]})
    assert (found, answer) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (OPENAI, {"messages": [{"role": "user", "content": "Hi"}]}),
        (ANTHROPIC, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
async def test_engines_receive_the_span_of_the_request(
    site: Site, path: str, fields: dict[str, Any]
) -> None:
    """Each request has its own span, also within one program and without an exporter."""
    spans = [f"00-{'ab' * 16}-{n:016x}-0{n % 2}" for n in (1, 2)]
    for span in (*spans, "nonsense", None):
        headers = {"x-parrot-program": "p"} | ({"traceparent": span} if span else {})
        await site.post(path, {"model": MODEL} | fields, headers=headers)
    requests = site.engine.requests or site.engine.embedded
    assert [request.traceparent for request in requests] == [*spans, "", ""]


@pytest.mark.parametrize("num_answers", [1, 2])
async def test_a_waiting_client_learns_why_the_session_ended(site: Site, num_answers: int) -> None:
    site.engine.script = Script(hang_after=0)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "n": num_answers}
    asking = asyncio.ensure_future(site.send(OPENAI, body))
    async with asyncio.timeout(20):
        while len(site.engine.requests) < num_answers:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    site.core.shut_down()
    status, answer = await asking
    assert (status, answer["error"]["message"]) == (503, "ServeCore is shutting down")
