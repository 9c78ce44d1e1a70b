"""All endpoints render slow chat templates outside of the event loop."""

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from parrot.serve.config import CoreConfig
from parrot.serve.prompts import templates
from parrot.serve.prompts.templates import ModelTemplate
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.byte_tokenizer import CHATML
from tests.support.fake_engine import fake_engine

MESSAGES = [{"role": "user", "content": "Hello"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hello"},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/tokenize": {"messages": MESSAGES},
}


@pytest.fixture
def rendering_threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that render a template. Each rendering counts as a slow one."""
    threads: set[int] = set()
    render = ModelTemplate.render

    def recorded(self: ModelTemplate, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        threads.add(threading.get_ident())
        return render(self, messages, **options)

    monkeypatch.setattr(ModelTemplate, "render", recorded)
    monkeypatch.setattr(templates, "_SLOW_S", 0.0)
    return threads


@pytest.fixture
async def site(rendering_threads: set[int]) -> AsyncIterator[Site]:
    async with serve(CoreConfig(), fake_engine("e0", model=MODEL, chat_template=CHATML)) as site:
        assert rendering_threads  # the common parts of all conversations were rendered
        yield site


@pytest.mark.parametrize("path", DOORS)
async def test_a_conversation(path: str, site: Site, rendering_threads: set[int]) -> None:
    rendering_threads.clear()
    await site.post(path, {"model": MODEL} | DOORS[path])
    assert rendering_threads
    assert threading.get_ident() not in rendering_threads


async def test_the_calls_of_a_program(site: Site, rendering_threads: set[int]) -> None:
    """The markup of the calls was rendered when the engine registered, and is only looked up."""
    made = await site.post("/v1/session", {})
    scope = {name: made[name] for name in ("session_id", "session_auth")}
    call: dict[str, Any] = {"system": "Be brief."}
    for turn in range(20):
        body = {"template": "Hello{{y}}", "parameters": [{"name": "y", "is_output": True}]}
        added = await site.post("/v1/semantic_call", scope | {"chat": True} | body | call)
        path = f"/v1/semantic_var/{added['param_info'][0]['var_id']}"
        async with site.http.get(path, params=scope) as answer:
            assert answer.status == 200, (turn, await answer.text())
        call = {"successor_of": added["request_id"]}
    assert threading.get_ident() not in rendering_threads


async def test_a_template_that_fails_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for the first turn and for later turns."""
    failing = "{% if messages|length > 3 %}{{ raise_exception('no') }}{% endif %}" + CHATML
    for template, num_turns in (("{{ raise_exception('no') }}", 1), (failing, 3)):
        chat = ModelTemplate(template)
        chat.learn()
        monkeypatch.setattr(ModelTemplate, "render", None)
        with pytest.raises(templates.InvalidRequest, match="no"):
            chat.markup(num_turns)
        monkeypatch.undo()
