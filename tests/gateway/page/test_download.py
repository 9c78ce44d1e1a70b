"""A run as a file, live and finished, over HTTP."""

from typing import Any

import pytest

from tests.gateway.page.test_prompt import Program, kept, opened
from tests.gateway.vendors.conftest import Site
from tests.support.fake_engine import Script
from tests.support.requests import given, made, taken


async def file(site: Site, run: int, name: str) -> tuple[int, Any]:
    async with site.http.get(f"/ui/api/sessions/{run}/{name}") as response:
        return response.status, await response.json()


async def finish(site: Site) -> tuple[Program, dict[str, str]]:
    """Run two calls, of which the second reads the first."""
    site.engine.script = Script(text=lambda prompt: "kea" if "Bird" in prompt else "kee-aa")
    program = await Program.begin(site)
    _, first = await program.call(
        "Bird of {{place}}: {{bird}}",
        given("place", "Chile"),
        made("bird", max_gen_length=20),
        func_name="find",
    )
    _, second = await program.call(
        "It sings {{bird}}: {{song}}", taken("bird", first["bird"]), made("song"), func_name="sing"
    )
    await program.read(second["song"])
    return program, first | second


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_run_as_json_has_all_texts_once(is_over: bool) -> None:
    async with opened() as site:
        program, variables = await finish(site)
        run = program.scope["session_id"]
        if is_over:
            await program.end()
            await kept(site)
        status, found = await file(site, run, "run.json")
        assert status == 200
        assert found["run"]["state"] == ("finished" if is_over else "active")
        texts, (first, second) = found["texts"], found["calls"]
        assert sorted(texts) == sorted(["Chile", "kea", "kee-aa", "Bird of ", ": ", "It sings "])
        by_id = {variable["id"]: variable for variable in found["variables"]}
        assert texts[by_id[variables["bird"]]["text"]] == "kea"
        assert [second["func_name"], second["inputs"]] == ["sing", [variables["bird"]]]
        assert [
            texts[piece["text"]] if "text" in piece else piece["name"] for piece in second["prompt"]
        ] == ["It sings ", "bird", ": "]
        assert [len(call["attempts"]) for call in (first, second)] == [1, 1]
        assert first["sampling"] == {"max_gen_length": 20}


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_run_as_a_trace_has_a_slice_for_each_call(is_over: bool) -> None:
    async with opened() as site:
        program, _ = await finish(site)
        if is_over:
            await program.end()
            await kept(site)
        status, trace = await file(site, program.scope["session_id"], "trace.json")
        assert status == 200
        events = trace["traceEvents"]
        slices = [event["name"] for event in events if event["ph"] == "X" and event["args"]]
        assert slices == ["find → bird", "sing → song"]
        assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["e0"]
        assert sum(event.get("cat") == "variable" for event in events) == 2


async def test_a_large_live_run_is_serialized_in_steps() -> None:
    async with opened() as site:
        program = await Program.begin(site)
        core, scope = site.core, program.scope
        for n in range(2000):
            core.create_var(scope["session_id"], scope["session_auth"], f"x{n}", f"text {n}")
        status, found = await file(site, scope["session_id"], "run.json")
        assert (status, len(found["variables"]), len(found["texts"])) == (200, 2000, 2000)
        assert found["calls"] == []


async def test_an_unknown_run_is_not_found() -> None:
    async with opened() as site:
        for name in ("run.json", "trace.json"):
            assert (await file(site, 7777, name))[0] == 404
