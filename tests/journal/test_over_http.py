"""The answers of clients over HTTP, and when they arrive, with a slow or full disk."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from parrot.journal.log import Journal, Record
from parrot.protocol.engine_api import RegisterRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.gateway.vendors.conftest import MODEL, Site
from tests.journal.replayed import MemoryFile
from tests.support.app_server import serve_app
from tests.support.fake_engine import FakeEngine, fake_engine


class HeldFile(MemoryFile):
    """A disk that writes only while it is `open`, and fails while it is `full`."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        super().__init__(records)
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()
        self.full = False

    def write(self, records: Sequence[Record]) -> None:
        self.asked.set()
        assert self.open.wait(20)
        if self.full:
            raise OSError("the disk is full")
        super().write(records)


@asynccontextmanager
async def serving(
    file: MemoryFile, engine: FakeEngine | None = None, config: CoreConfig | None = None
) -> AsyncIterator[Site]:
    config, engine = config or CoreConfig(), engine or fake_engine("e0", model=MODEL)
    journal = Journal(file, MonotonicClock())
    clock = journal.clock
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda _: engine))
    app = create_app(core, journal)
    async with serve_app(app) as url, aiohttp.ClientSession(url) as http:
        await core.register_engine(RegisterRequest(engine_config=engine.info))
        yield Site(core, engine, http)
        core.check_integrity()
    await journal.close()


def journal_of(site: Site) -> Journal:
    journal = site.core.sessions.journal
    assert journal is not None
    return journal


async def full(site: Site, file: HeldFile) -> None:
    """Make the disk full, and wait until ServeCore knows."""
    file.full = True
    assert (await site.send("/v1/session", {}))[0] == 507


@asynccontextmanager
async def program(site: Site) -> AsyncIterator[dict[str, Any]]:
    scope = await site.post("/v1/session", {})
    yield {"session_id": scope["session_id"], "session_auth": scope["session_auth"]}


CALL = {
    "template": "Say {{x}}: {{out}}",
    "parameters": [{"name": "x", "value": "this"}, {"name": "out", "is_output": True}],
}


async def test_calls_and_sessions_can_be_ended_while_the_disk_is_full() -> None:
    """Otherwise no client could free space, or see that there is space."""
    file = HeldFile()
    async with serving(file) as site, program(site) as scope:
        call = await site.post("/v1/semantic_call", scope | CALL)
        var_id = call["param_info"][-1]["var_id"]
        await full(site, file)
        metrics = b"".join(site.core.metrics()).decode()
        assert "parrot_journal_unwritable 1.0" in metrics
        for path in (f"request/{call['request_id']}", f"semantic_var/{var_id}"):
            for _ in range(2):
                assert (await site.send(f"/v1/{path}/cancel", scope))[0] == 200
        read = f"/v1/semantic_var/{var_id}"
        async with site.http.get(read, params=scope) as answer:
            assert answer.status == 499
        path = f"/v1/session/{scope['session_id']}"
        async with site.http.delete(path, params=scope) as answer:
            assert answer.status == 200
        async with site.http.delete(path, params=scope) as answer:
            assert answer.status == 410
        file.full = False
        journal = journal_of(site)
        async with asyncio.timeout(20):
            while journal.trouble:  # noqa: ASYNC110 - there is no event for the next attempt
                await asyncio.sleep(0.02)
            await journal.durable()
        assert "parrot_journal_unwritable 0.0" in b"".join(site.core.metrics()).decode()
    async with serving(MemoryFile(file.records)) as site:
        assert site.core.sessions.find(scope["session_id"]) is None


ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
    "/v1/responses": {"input": "Hi"},
}


ALL_STREAMS = [(path, {}) for path in ENDPOINTS] + [("/v1/chat/completions", {"n": 2})]


@pytest.mark.parametrize(("path", "fields"), ALL_STREAMS)
async def test_a_stream_ends_after_its_answer_is_on_disk(path: str, fields: dict[str, int]) -> None:
    """Chunks arrive before the answer is on disk, the end only after that."""
    file = HeldFile()
    body = ENDPOINTS[path] | {"model": MODEL, "stream": True} | fields
    async with serving(file) as site:
        await site.post(path, body | {"stream": False})  # creates the session of the program
        file.open.clear()
        async with site.http.post(path, json=body) as response:
            seen = b""
            while b"<" not in seen:
                seen += await response.content.readany()
            for _ in range(300):
                await asyncio.sleep(0)
            seen += response.content.read_nowait()
            ends = (b"[DONE]", b"message_stop", b"response.completed", b'"finish_reason":"stop"')
            assert not any(end in seen for end in ends), seen
            file.open.set()
            rest = await response.text()
            assert any(end.decode() in rest for end in ends), rest


async def test_a_session_that_could_not_be_written_has_ended() -> None:
    """The program got an error, and does not know the session's id."""
    file = HeldFile()
    async with serving(file) as site:
        await full(site, file)
        assert not list(site.core.sessions)
        file.full = False
        await journal_of(site).writable()
        await site.post("/v1/session", {})
    async with serving(MemoryFile(file.records)) as site:
        assert len(list(site.core.sessions)) == 1


NEW = {"session": {}, "semantic_graph": {"session": {}, "calls": [CALL]}}


@pytest.mark.parametrize("path", NEW)
async def test_a_session_ends_if_its_client_left_before_the_answer(path: str) -> None:
    file = HeldFile()
    async with serving(file) as site:
        file.open.clear()
        asking = asyncio.ensure_future(site.send(f"/v1/{path}", NEW[path]))
        async with asyncio.timeout(20):
            while not list(site.core.sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            asking.cancel()
            while list(site.core.sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        file.open.set()
    async with serving(MemoryFile(file.records)) as site:
        assert not list(site.core.sessions)


@pytest.mark.parametrize("path", ["semantic_var", "session/{session_id}"])
async def test_variables_are_listed_after_they_are_on_disk(path: str) -> None:
    """Listing and reading have the same rule."""
    file = HeldFile()
    async with serving(file) as site, program(site) as scope:
        file.open.clear()
        journal_of(site).append(str(scope["session_id"]), "read", {})

        async def answered() -> str:
            async with site.http.get("/v1/" + path.format(**scope), params=scope) as answer:
                assert answer.status == 200
                return await answer.text()

        asking = asyncio.ensure_future(answered())
        await asyncio.wait([asking], timeout=0.1)
        assert not asking.done()
        file.open.set()
        assert await asking


REPEATED = CALL | {"idempotency_key": "one"}
REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "set": ("semantic_var/{var_id}", {"content": "again"}, 409),
    "call": ("semantic_call", REPEATED | {"template": "Else: {{x}} {{out}}"}, 409),
    "graph": ("semantic_graph", {"calls": [CALL], "idempotency_key": "one"}, 409),
    "end": ("session/{session_id}", {}, 410),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_repeated_request_is_answered_after_the_first_is_on_disk(
    name: str, is_lost: bool
) -> None:
    """A client that repeats a request after a lost answer treats `already done` as a success."""
    path, body, status = REFUSED[name]
    method = "DELETE" if name == "end" else "POST"
    file = HeldFile()
    async with serving(file) as site, program(site) as scope:
        created = await site.post("/v1/semantic_var", scope | {"var_name": "v"})
        path = "/v1/" + path.format(**scope, **created)

        async def answered(method: str, path: str, body: dict[str, Any]) -> int:
            async with site.http.request(method, path, json=scope | body) as answer:
                return answer.status

        file.asked.clear()
        file.open.clear()
        file.full = is_lost
        first = (method, path, body)
        if name in ("call", "graph"):
            first = ("POST", "/v1/semantic_call", REPEATED)
        asking = [asyncio.ensure_future(answered(*first))]
        assert await asyncio.to_thread(file.asked.wait, 20)
        asking.append(asyncio.ensure_future(answered(method, path, body)))
        await asyncio.wait(asking, timeout=0.1)
        assert not any(one.done() for one in asking)
        file.open.set()
        is_refused = is_lost and name != "end"
        assert await asyncio.gather(*asking) == ([507, 507] if is_refused else [200, status])
        file.full = False


async def test_a_finished_answer_is_returned_although_the_disk_is_full() -> None:
    file = HeldFile()
    engine = fake_engine("e0", model=MODEL)
    engine.script.hang_after = 1
    path = "/v1/chat/completions"
    body = ENDPOINTS[path] | {"model": MODEL}
    async with serving(file, engine) as site:
        asking = asyncio.ensure_future(site.post(path, body))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await full(site, file)
        engine.resume.set()
        assert (await asking)["choices"][0]["message"]["content"]
        status, answer = await site.send(path, body)
        assert status == 507, answer
        file.full = False


RESPONSES = "/v1/responses"


async def ended(site: Site, response_id: str) -> Any:
    """Poll a response until it has ended."""
    async with asyncio.timeout(20):
        async with site.http.get(f"{RESPONSES}/{response_id}", params={"stream": "true"}) as it:
            await it.text()
        async with site.http.get(f"{RESPONSES}/{response_id}") as answer:
            return await answer.json()


def hanging() -> FakeEngine:
    engine = fake_engine("e0", model=MODEL)
    engine.script.hang_after = 1
    return engine


async def begun_in_the_background(site: Site, **fields: Any) -> Any:
    body = {"model": MODEL, "input": "Hi", "background": True} | fields
    before = len(site.engine.requests)
    response = await site.post(RESPONSES, body)
    while len(site.engine.requests) == before:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return response


@pytest.mark.parametrize(("store", "stream"), [(True, False), (True, True), (False, True)])
async def test_a_response_that_cannot_be_stored_is_not_returned(store: bool, stream: bool) -> None:
    """After a restart, there would be no response with this id."""
    file, engine = HeldFile(), hanging()
    body = {"model": MODEL, "input": "Hi", "store": store, "stream": stream}

    async def ask(site: Site) -> tuple[int, str]:
        async with site.http.post(RESPONSES, json=body) as response:
            return response.status, await response.text()

    async with serving(file, engine) as site:
        asking = asyncio.ensure_future(ask(site))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await full(site, file)
        engine.resume.set()
        status, text = await asking
        assert status == (200 if stream else 507)
        assert ("response.completed" in text) is (not store)
        assert ("the journal cannot be written" in text) is store
        file.full = False


class NoResponses(HeldFile):
    """A storage that cannot write responses until it is `open`."""

    def write(self, records: Sequence[Record]) -> None:
        if any(record.subject.startswith("resp_") for record in records):
            super().write(records)
        else:
            MemoryFile.write(self, records)


async def test_a_response_is_repeated_after_it_is_on_disk() -> None:
    file = NoResponses()
    body = {"model": MODEL, "input": "Hi"}
    async with serving(file) as site:
        file.open.clear()

        async def given(stream: bool) -> str:
            asked, headers = body | {"stream": stream}, {"Idempotency-Key": "one"}
            async with site.http.post(RESPONSES, json=asked, headers=headers) as answer:
                return await answer.text()

        first = asyncio.ensure_future(given(stream=False))
        assert await asyncio.to_thread(file.asked.wait, 20)
        again = asyncio.ensure_future(given(stream=True))
        await asyncio.wait([again], timeout=0.2)
        assert not again.done()
        file.open.set()
        assert json.loads(await first)["id"] in await again


async def test_a_repeated_deletion_is_answered_after_the_first_is_on_disk() -> None:
    """A client that repeats the deletion after a lost answer treats `not found` as a success."""
    file = HeldFile()
    async with serving(file) as site:
        response = await site.post(RESPONSES, {"model": MODEL, "input": "Hi"})

        async def deleted() -> int:
            async with site.http.delete(f"{RESPONSES}/{response['id']}") as answer:
                return answer.status

        file.asked.clear()
        file.open.clear()
        asking = [asyncio.ensure_future(deleted())]
        assert await asyncio.to_thread(file.asked.wait, 20)
        asking.append(asyncio.ensure_future(deleted()))
        await asyncio.wait(asking, timeout=0.1)
        assert not any(one.done() for one in asking)
        file.open.set()
        assert await asyncio.gather(*asking) == [200, 404]


async def test_a_response_that_ends_during_the_shutdown_is_kept() -> None:
    file, engine = MemoryFile(), hanging()
    async with serving(file, engine) as site:
        asking = asyncio.ensure_future(site.post(RESPONSES, {"model": MODEL, "input": "Hi"}))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        site.core.is_closing = True  # its sessions are still open
        engine.resume.set()
        made = await asking
    async with serving(MemoryFile(file.records)) as site:
        assert await ended(site, made["id"]) == made


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a_background_response_is_returned_after_it_is_on_disk(stream: str) -> None:
    """Before that, a restart would create another response."""

    class Held(MemoryFile):
        reached, open = threading.Event(), threading.Event()

        def write(self, records: Sequence[Record]) -> None:
            if any(r.kind == "response" and r.fields()["body"] for r in records):
                self.reached.set()
                assert self.open.wait(20)
            super().write(records)

    file, engine = Held(), hanging()
    async with serving(file, engine) as site:
        response = await begun_in_the_background(site)
        path = f"{RESPONSES}/{response['id']}"

        async def answered() -> str:
            async with site.http.get(path, params={"stream": stream}) as answer:
                return await answer.text()

        engine.resume.set()
        assert await asyncio.to_thread(file.reached.wait, 20)
        asking = asyncio.ensure_future(answered())
        await asyncio.wait([asking], timeout=0.1)
        assert not asking.done()
        file.open.set()
        assert '"status":"completed"' in (await asking).replace(" ", "")


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_background_response_is_recomputed_after_a_restart(is_killed: bool) -> None:
    file, tools = MemoryFile(), [{"type": "function", "name": "f", "parameters": {}}]
    engine = fake_engine("e0", model=MODEL)
    async with serving(file, engine) as site:
        first = await site.post(RESPONSES, {"model": MODEL, "input": "One"})
        engine.script.hang_after = 1
        began = await begun_in_the_background(
            site,
            input="Two",
            previous_response_id=first["id"],
            instructions="Be brief.",
            tools=tools,
            tool_choice="none",
            prompt_cache_key="p",
            temperature=0.5,
        )
        cancelled = await begun_in_the_background(site, input="No")
        await site.post(f"{RESPONSES}/{cancelled['id']}/cancel", {})
        prompt = engine.prompts[-2]
        await journal_of(site).durable()
        records = file.records.copy()
    again, other = fake_engine("e0", model=MODEL), fake_engine("e1", model="another")
    async with serving(MemoryFile(records if is_killed else file.records), other) as site:
        async with site.http.get(f"{RESPONSES}/{began['id']}") as answer:
            assert (await answer.json())["status"] == "queued"
        site.core.fleet._connect = lambda _: again
        await site.core.register_engine(RegisterRequest(engine_config=again.info))
        made = await ended(site, began["id"])
        assert made["status"] == "completed"
        assert made["output"][0]["content"][0]["text"]
        for name in ("id", "created_at", "instructions", "tools", "temperature"):
            assert made[name] == began[name]
        assert again.prompts == [prompt]
        assert again.requests[0].sampling_config.temperature == 0.5
        assert (await ended(site, cancelled["id"]))["status"] == "cancelled"
        third = {"model": MODEL, "input": "Three", "previous_response_id": made["id"]}
        assert (await site.post(RESPONSES, third))["status"] == "completed"
        await journal_of(site).durable()
        assert (await ended(site, began["id"])) == made


async def test_a_full_queue_rejects_no_restored_background_response() -> None:
    """The response was accepted before the restart."""
    async with serving(file := MemoryFile(), hanging()) as site:
        began = [await begun_in_the_background(site, input=f"Say {i}") for i in range(3)]
        await journal_of(site).durable()
        records = file.records.copy()
    config = CoreConfig.model_validate({"global_scheduler": {"max_queue_size": 1}})
    again, other = fake_engine("e0", model=MODEL), fake_engine("e1", model="another")
    async with serving(MemoryFile(records), other, config) as site:
        site.core.fleet._connect = lambda _: again
        await site.core.register_engine(RegisterRequest(engine_config=again.info))
        for response in began:
            assert (await ended(site, response["id"]))["status"] == "completed"


async def test_a_full_disk_fails_no_background_response_after_a_restart() -> None:
    """The response is computed when the disk has space."""
    async with serving(file := HeldFile(), hanging()) as site:
        began = await begun_in_the_background(site)
        await journal_of(site).durable()
        records = file.records.copy()
    file, other = HeldFile(records), fake_engine("e1", model="another")
    again = fake_engine("e0", model=MODEL)
    async with serving(file, other) as site:
        await full(site, file)
        site.core.fleet._connect = lambda _: again
        await site.core.register_engine(RegisterRequest(engine_config=again.info))
        for _ in range(20):
            await asyncio.sleep(0)
        async with site.http.get(f"{RESPONSES}/{began['id']}") as answer:
            assert (await answer.json())["status"] == "queued"
        file.full = False
        assert (await ended(site, began["id"]))["status"] == "completed"


async def test_a_background_response_that_was_interrupted_can_be_cancelled_and_deleted() -> None:
    file = MemoryFile()
    async with serving(file, hanging()) as site:
        responses = [await begun_in_the_background(site, input=f"{i}") for i in range(2)]
        await journal_of(site).durable()
        records = file.records.copy()
    other = fake_engine("e1", model="another")
    file = MemoryFile(records)
    async with serving(file, other) as site:
        paths = [f"{RESPONSES}/{response['id']}" for response in responses]
        assert (await site.post(f"{paths[0]}/cancel", {}))["status"] == "cancelled"
        async with site.http.delete(paths[1]) as answer:
            assert answer.status == 200
        engine = fake_engine("e0", model=MODEL)
        site.core.fleet._connect = lambda _: engine
        await site.core.register_engine(RegisterRequest(engine_config=engine.info))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not engine.requests
        await journal_of(site).durable()
        records = file.records.copy()
    async with serving(MemoryFile(records), other) as site:
        assert (await ended(site, responses[0]["id"]))["status"] == "cancelled"
        async with site.http.get(paths[1]) as answer:
            assert answer.status == 404
