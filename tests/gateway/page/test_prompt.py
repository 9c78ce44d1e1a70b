"""The prompt of a call over HTTP: the text that the engine received, split where cached KV ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.byte_tokenizer import CHATML
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.requests import given, made, taken


@asynccontextmanager
async def opened(engine: FakeEngine | None = None) -> AsyncIterator[Site]:
    async with serve(CoreConfig(insecure=True), engine or fake_engine("e0", model=MODEL)) as site:
        yield site


class Program:
    """One session over HTTP."""

    def __init__(self, site: Site, scope: dict[str, Any]) -> None:
        self.site = site
        self.scope = scope

    @classmethod
    async def begin(cls, site: Site) -> "Program":
        return cls(site, await site.post("/v1/session", {}))

    async def call(
        self, template: str, *parameters: dict[str, Any], **fields: Any
    ) -> tuple[int, dict[str, str]]:
        """Submit a call, and return its request id and its variables by name."""
        body = self.scope | {"template": template, "parameters": parameters} | fields
        answer = await self.site.post("/v1/semantic_call", body)
        variables = {info["var_name"]: info["var_id"] for info in answer["param_info"]}
        return answer["request_id"], variables

    async def read(self, var_id: str) -> str:
        query = {name: str(value) for name, value in self.scope.items()}
        async with self.site.http.get(f"/v1/semantic_var/{var_id}", params=query) as response:
            assert response.status == 200, await response.text()
            content: str = (await response.json())["content"]
            return content

    async def end(self) -> None:
        path = f"/ui/api/sessions/{self.scope['session_id']}/end"
        await self.site.post(path, {})


async def prompt(site: Site, run: int, request_id: int, **query: str) -> dict[str, Any]:
    status, answer = await asked(site, run, request_id, **query)
    assert status == 200, answer
    return answer


async def asked(site: Site, run: int, request_id: int, **query: str) -> tuple[int, Any]:
    path = f"/ui/api/sessions/{run}/calls/{request_id}/prompt"
    async with site.http.get(path, params=query) as response:
        return response.status, await response.json()


def texts(answer: dict[str, Any], *, cached: bool | None = None) -> str:
    parts = answer["prompt"]
    return "".join(part["text"] for part in parts if cached in (None, part["cached"]))


async def kept(site: Site) -> None:
    """Wait until no session is open or ending."""
    async with asyncio.timeout(20):
        while len(site.core.sessions) or site.core.sessions._ending:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_the_cached_part_ends_where_the_kv_of_an_earlier_call_ended() -> None:
    async with opened(fake_engine("e0", model=MODEL, add_bos=True)) as site:
        program = await Program.begin(site)
        run = program.scope["session_id"]
        template = "Write about the bird {{bird}}, in {{style}}: {{out}}"
        for style in ("short", "songs"):
            request_id, variables = await program.call(
                template, given("bird", "kea"), given("style", style), made("out"), reuse=False
            )
            await program.read(variables["out"])
        answer = await prompt(site, run, request_id)
        assert texts(answer) == "<s>Write about the bird kea, in songs: "
        assert 0 < answer["cached_tokens"] < answer["prompt_tokens"]
        cached = texts(answer, cached=True)
        assert len(cached.removeprefix("<s>")) + 1 == answer["cached_tokens"]
        assert answer["is_exact"]
        roles = [(part["role"], part.get("name")) for part in answer["prompt"]]
        assert list(dict.fromkeys(roles)) == [
            ("template", None),
            ("input", "bird"),
            ("input", "style"),
        ]
        await program.end()
        await kept(site)
        assert await prompt(site, run, request_id) == answer


async def test_a_call_with_two_outputs_has_the_first_one_in_its_prompt() -> None:
    async with opened() as site:
        site.engine.script = Script(text=lambda text: "kea")
        program = await Program.begin(site)
        run = program.scope["session_id"]
        request_id, variables = await program.call(
            "Bird: {{bird}} Song: {{song}}", made("bird"), made("song")
        )
        await program.read(variables["song"])
        answer = await prompt(site, run, request_id)
        assert [(p["role"], p.get("name"), p["text"]) for p in answer["prompt"]] == [
            ("template", None, "Bird: "),
            ("output", "bird", "kea"),
            ("template", None, " Song: "),
        ]
        first = await prompt(site, run, request_id, output=variables["bird"])
        assert texts(first) == "Bird: "
        await program.end()
        await kept(site)
        assert await prompt(site, run, request_id) == answer
        assert await prompt(site, run, request_id, output=variables["bird"]) == first


async def test_a_prompt_of_a_call_that_waits_has_gaps() -> None:
    async with opened() as site:
        site.engine.script = Script(hang_after=0)
        program = await Program.begin(site)
        run = program.scope["session_id"]
        _, first = await program.call("One {{x}}", made("x"))
        request_id, _ = await program.call("Two {{x}} and {{y}}", taken("x", first["x"]), made("y"))
        answer = await prompt(site, run, request_id)
        assert answer["prompt"] == [
            {"role": "template", "text": "Two ", "cached": False},
            {"role": "input", "name": "x", "text": None, "cached": False},
            {"role": "template", "text": " and ", "cached": False},
        ]
        assert answer["cached_tokens"] is None


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_chat_shows_the_markup_that_the_model_received(is_over: bool) -> None:
    async with opened() as site:
        program = await Program.begin(site)
        run = program.scope["session_id"]
        request_id, variables = await program.call(
            "Name a bird of {{place}}. {{out}}",
            given("place", "Chile"),
            made("out"),
            chat=True,
            system="Be brief.",
        )
        await program.read(variables["out"])
        if is_over:
            await program.end()
            await kept(site)
        answer = await prompt(site, run, request_id)
        assert texts(answer) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nName a bird of Chile.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert {part["role"] for part in answer["prompt"]} == {"system", "user"}


async def test_the_default_system_message_is_not_shown_as_the_user_s() -> None:
    default = "<|im_start|>system\nHelp the user.<|im_end|>\n"
    engine = fake_engine("e0", model=MODEL, chat_template=default + CHATML)
    async with opened(engine) as site:
        program = await Program.begin(site)
        call = {"chat": True, "reuse": False}
        for style in ("prose", "verse"):
            request_id, variables = await program.call(
                "Write in {{style}}{{out}}", given("style", style), made("out"), **call
            )
            await program.read(variables["out"])
        answer = await prompt(site, program.scope["session_id"], request_id)
        parts = [(p["role"], p.get("name"), p["text"]) for p in answer["prompt"] if not p["cached"]]
        cached = texts(answer, cached=True)
        assert cached.startswith(default)
        assert answer["prompt"][0] == {"role": "system", "text": default, "cached": True}
        assert parts[-2:] == [
            ("user", "style", "verse"),
            ("user", None, "<|im_end|>\n<|im_start|>assistant\n"),
        ]


@pytest.mark.parametrize("is_over", [False, True])
async def test_requests_of_a_client_have_its_messages_and_outputs(is_over: bool) -> None:
    async with opened() as site:
        site.engine.script = Script(text=lambda text: "A kea sings loudly.")
        first = [{"role": "user", "content": "Which bird sings?"}]
        said = {"role": "assistant", "content": "A kea sings loudly."}
        second = [*first, said, {"role": "user", "content": "Where?"}]
        third = [{"role": "system", "content": "It is Monday."}, *second]
        for messages in (first, second, third):
            chat = {"model": MODEL, "messages": messages, "prompt_cache_key": "p"}
            await site.post("/v1/chat/completions", chat)
        (session,) = site.core.sessions
        ids = list(session.graph.calls)
        if is_over:
            await site.post(f"/ui/api/sessions/{session.id}/end", {})
            await kept(site)
        continued, left = [await prompt(site, session.id, n) for n in ids[1:]]
        spoken = [(p["role"], p["text"]) for p in continued["prompt"] if p["role"] != "markup"]
        assert spoken == [
            ("user", "Which bird sings?"),
            ("assistant", "A kea sings loudly."),
            ("user", "Where?"),
        ]
        assert texts(continued).endswith("<|im_start|>assistant\n")
        assert texts(continued, cached=True)
        assert continued["left_by"] is None
        assert [p["role"] for p in left["prompt"] if p["text"] == "It is Monday."] == ["system"]
        assert "Monday" in left["left_by"]


async def test_a_prompt_of_a_foreign_engine_is_cut_by_estimate() -> None:
    async with opened(fake_engine("e0", model=MODEL, text=True)) as site:
        program = await Program.begin(site)
        request_id, variables = await program.call("Name a bird: {{out}}", made("out"))
        await program.read(variables["out"])
        answer = await prompt(site, program.scope["session_id"], request_id)
        assert texts(answer) == "Name a bird: "
        assert not answer["is_exact"]


async def test_unknown_calls_and_native_functions_have_no_prompt() -> None:
    async with opened() as site:
        program = await Program.begin(site)
        run = program.scope["session_id"]
        body = program.scope | {
            "func_name": "shout",
            "func_source": "def shout(a, out):\n    out.set(a.upper())",
            "parameters": [given("a", "hey"), made("out")],
        }
        native = (await site.post("/v1/py_native_call", body))["request_id"]
        request_id, _ = await program.call("Name a bird: {{out}}", made("out"))
        for wrong in (native, 7777):
            assert (await asked(site, run, wrong))[0] == 404
        assert (await asked(site, run, request_id, output="nothing"))[0] == 404
        assert (await asked(site, 7777, request_id))[0] == 404
        await program.end()
        await kept(site)
        for wrong in (native, 7777):
            assert (await asked(site, run, wrong))[0] == 404
        assert (await asked(site, run, request_id, output="nothing"))[0] == 404
