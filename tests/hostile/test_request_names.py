"""Parrot does not use names and texts of requests as paths, addresses, templates or code. It opens
no file and no connection that they name."""

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from parrot.serve.config import CoreConfig
from tests.gateway.test_transcript import HERMES
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import fake_engine

CANARY = "canary-of-a-name"
NAMES = [
    f"../../../../etc/{CANARY}",
    f"/etc/{CANARY}",
    f"~/{CANARY}",
    f"file:///etc/{CANARY}",
    f"http://169.254.169.254/{CANARY}",
    f"organisation/{CANARY}",
    f"{MODEL}/../{CANARY}",
    f"{CANARY}\x00.gguf",
    f"{{{{ {CANARY} }}}}",
]
USER = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": USER,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": USER | {"max_tokens": 5},
    "/v1/messages/count_tokens": USER,
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}
_touched: list[str] = []
_WATCHED = ("open", "os.listdir", "os.scandir", "socket.getaddrinfo", "socket.connect", "import")


def _watch(
    event: str, args: tuple[object, ...], watched: Sequence[str] = _WATCHED, canary: str = CANARY
) -> None:
    # `watched` and `canary` are parameters because the hook outlives the globals.
    if event in watched and canary in str(args):
        _touched.append(f"{event} {args}")


@pytest.fixture(scope="module", autouse=True)
def watched() -> None:
    sys.addaudithook(_watch)  # audit hooks cannot be removed


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    _touched.clear()
    yield
    assert not _touched


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve(CoreConfig(), fake_engine("e0", model=MODEL, chat_template=HERMES)) as site:
        yield site


def test_the_canary_detects_accesses() -> None:
    with pytest.raises(OSError, match=CANARY):
        Path(f"/nowhere/{CANARY}").read_bytes()
    assert _touched
    _touched.clear()


@pytest.mark.parametrize("path", ROUTES)
async def test_an_unknown_model_is_rejected(site: Site, path: str) -> None:
    for name in NAMES:
        status, answer = await site.send(path, ROUTES[path] | {"model": name})
        assert status == 404, (name, answer)
        assert not site.engine.requests


async def test_an_unknown_model_in_a_path_or_a_call_is_rejected(site: Site) -> None:
    scope = await site.post("/v1/session", {})
    for name in NAMES:
        quoted = name.replace("/", "%2F").replace("{", "%7B").replace("\x00", "%00")
        async with site.http.get(f"/v1/models/{quoted}") as answer:
            assert answer.status in (400, 404), name
        call = {
            "template": "Say {{out}}",
            "models": [name],
            "parameters": [{"name": "out", "is_output": True}],
        }
        status, said = await site.send("/v1/semantic_call", scope | call)
        assert status in (400, 404), said
    assert not site.engine.requests


TEMPLATES = [
    "{{ 7 * 7 }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
]


@pytest.mark.parametrize("text", TEMPLATES)
async def test_a_template_in_a_text_is_not_rendered(site: Site, text: str) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}
    await site.post("/v1/chat/completions", chat)
    await site.post("/v1/chat/completions", chat | {"tools": [tool]})
    await site.post("/v1/chat/completions", chat | {"chat_template_kwargs": {"extra": text}})
    assert all(text in prompt for prompt in site.engine.prompts)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_a_request_cannot_bring_a_template(site: Site, path: str) -> None:
    given = ROUTES[path] | {"model": MODEL, "chat_template": "{{ messages }}"}
    status, answer = await site.send(path, given)
    assert status == 400
    assert "chat_template" in str(answer)


async def test_the_url_of_an_image_is_not_fetched(site: Site) -> None:
    url = f"http://{CANARY}.example/x.png"
    part = {"type": "image_url", "image_url": {"url": url}}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
    status, answer = await site.send("/v1/chat/completions", chat)
    assert status == 400
    assert "image_url" in str(answer)
