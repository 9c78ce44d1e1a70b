"""`POST /v1/embeddings` in OpenAI's format."""

import asyncio
from base64 import b64decode
from pathlib import Path
from struct import unpack
from typing import Any

import aiohttp
import pytest

from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import (
    EngineFailed,
    OutOfMemory,
    QuotaExceeded,
    Unavailable,
    UnsupportedField,
)
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.serve.tenants.keys import entry, write_keys
from tests.support.app_server import serve_app
from tests.support.fake_engine import Script, fake_engine

PATH = "/v1/embeddings"


def body(given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given, **fields}


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("abc", ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
async def test_all_forms_of_inputs(site: Site, given: Any, inputs: list[Any]) -> None:
    """Texts are tokenized by ServeCore."""
    answer = await site.post(PATH, body(given, user="me"))
    count = sum(map(len, inputs))
    assert answer.pop("usage") == {"prompt_tokens": count, "total_tokens": count}
    data = answer.pop("data")
    assert answer == {"object": "list", "model": MODEL}
    assert [item["index"] for item in data] == list(range(len(inputs)))
    assert [item["embedding"] for item in data] == [[len(one), 0.5, -1.0] for one in inputs]
    assert {item["object"] for item in data} == {"embedding"}
    asked = [list(one) for one in site.engine.embedded[0].inputs]
    assert asked == [site.engine._encode(i) if isinstance(i, str) else i for i in inputs]


async def test_base64_encodes_little_endian_floats(site: Site) -> None:
    answer = await site.post(PATH, body(["abc", "d"], encoding_format="base64"))
    raw = [b64decode(item["embedding"]) for item in answer["data"]]
    assert [unpack("<3f", one) for one in raw] == [(3.0, 0.5, -1.0), (1.0, 0.5, -1.0)]


async def test_many_inputs_are_several_requests_to_engines(site: Site) -> None:
    answer = await site.post(PATH, body(["ab"] * 150))
    assert [len(request.inputs) for request in site.engine.embedded] == [64, 64, 22]
    assert [item["index"] for item in answer["data"]] == list(range(150))
    assert answer["usage"]["prompt_tokens"] == 300


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ""}, "input", "input 0 is empty"),
        ({"input": ["a", ""]}, "input", "input 1 is empty"),
        ({"input": []}, "input", ""),
        ({"input": [[1], []]}, "input", "input 1 is empty"),
        ({"input": ["a", 1]}, "input.texts.1", ""),
        ({"input": [1, "a"]}, "input.ids.1", ""),
        ({"input": [-1]}, "input.ids.0", ""),
        ({"input": ["a"] * 2049}, "input.texts", "2048"),
        ({"input": {"a": 1}}, "input.texts", ""),
        ({"input": None}, "input.texts", ""),
        ({"input": "a", "dimensions": 8}, "dimensions", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "foo": 1}, "foo", ""),
    ],
)
async def test_invalid_requests(site: Site, fields: Any, param: str, words: str) -> None:
    status, answer = await site.send(PATH, {"model": MODEL, **fields})
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"].startswith(param.split(".")[0])
    assert words in error["message"]
    assert not site.engine.embedded


async def test_an_input_that_is_too_long_is_named(site: Site) -> None:
    limit = site.engine.info.max_seq_len
    for given in ([[1], [1] * (limit + 1)], ["a", "b" * (limit + 1)]):
        status, answer = await site.send(PATH, body(given))
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["message"].startswith(f"input 1 has {limit + 1} tokens")
    status, answer = await site.send(PATH, body("a") | {"model": "nope"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_model_without_embeddings(site: Site) -> None:
    site.engine.script = Script(error=UnsupportedField("cannot compute embeddings", param="model"))
    status, answer = await site.send(PATH, body("a"))
    assert (status, answer["error"]["code"]) == (400, "unsupported_field")
    assert len(site.engine.embedded) == 1


async def test_a_client_that_disconnects(site: Site) -> None:
    site.engine.script = Script(hang_after=0)
    asking = asyncio.create_task(site.send(PATH, body("a")))
    await until(lambda: bool(site.engine.embedded))
    asking.cancel()
    await asyncio.wait_for(site.engine.aborted.wait(), 10)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


async def test_keys_and_quotas() -> None:
    config = CoreConfig(
        api_keys=("one", "two"),
        cluster_token="token",
        global_scheduler=GlobalSchedulerConfig(max_queue_size=2),
    )
    async with serve(config, fake_engine("e0", model=MODEL)) as site:
        status, _ = await site.send(PATH, body("a"))
        assert status == 401
        site.engine.script = Script(hang_after=0)
        mine = {"headers": {"authorization": "Bearer one"}}
        waiting = [asyncio.create_task(site.send(PATH, body("a"), **mine)) for _ in range(2)]
        await until(lambda: len(site.engine.embedded) == 2)
        async with site.http.post(PATH, json=body("a"), **mine) as response:
            assert response.status == 503
            assert response.headers["retry-after"]
        other = asyncio.create_task(
            site.send(PATH, body("a"), headers={"authorization": "Bearer two"})
        )
        await until(lambda: len(site.engine.embedded) == 3)
        site.engine.resume.set()
        assert [status for status, _ in await asyncio.gather(*waiting, other)] == [200] * 3


async def test_other_names_of_models() -> None:
    config = CoreConfig(model_aliases={"text-embedding-3-small": MODEL})
    async with serve(config, fake_engine("e0", model=MODEL)) as site:
        answer = await site.post(PATH, body("abc") | {"model": "text-embedding-3-small"})
        assert answer["model"] == "text-embedding-3-small"


async def test_another_engine_takes_over() -> None:
    """The first engine is lost, has no free blocks, or fails. After too many failures, the request
    fails."""
    engines = [fake_engine(f"e{i}", model=MODEL) for i in range(2)]
    clients = {engine.info.engine_name: engine for engine in engines}
    config, clock = CoreConfig(), MonotonicClock()
    dispatcher = Dispatcher(config, clock, lambda info: clients[info.engine_name])
    core = ServeCore(config, clock=clock, dispatcher=dispatcher)
    async with serve_app(create_app(core)) as url, aiohttp.ClientSession(url) as http:
        for engine in engines:
            await core.register_engine(RegisterRequest(engine_config=engine.info))
        site = Site(core, engines[0], http)
        for error in (OutOfMemory("full"), QuotaExceeded("many"), EngineFailed("no")):
            for engine in engines:
                engine.embedded.clear()
            engines[0].scripts = [Script(error=error)]
            await site.post(PATH, body("abc"))
            assert [len(engine.embedded) for engine in engines] == [1, 1]
        engines[0].script = engines[1].script = Script(error=EngineFailed("no"))
        status, answer = await site.send(PATH, body("abc"))
        assert (status, answer["error"]["type"]) == (502, "server_error")

        engines[0].script, engines[1].script = Script(hang_after=0), Script()
        engines[0].embedded.clear()
        asking = asyncio.create_task(site.post(PATH, body("abc")))
        await until(lambda: bool(engines[0].embedded))
        lost = next(engine for engine in core.fleet if engine.client is engines[0])
        core.fleet.lose(lost, "it is tested")
        assert (await asking)["data"]
        engines[1].script = Script(error=Unavailable("gone"))
        engines[1].ping_error = Unavailable("gone")
        status, _ = await site.send(PATH, body("abc"))
        assert status in (502, 503)
        status, answer = await site.send(PATH, body("abc"))
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        core.check_integrity()


async def test_embeddings_that_fail_are_not_charged(tmp_path: Path) -> None:
    limits = {"tokens_per_minute": 10}
    config = CoreConfig(
        keys_file=write_keys(tmp_path / "keys.json", entry("a", "k", limits=limits))
    )
    headers = {"Authorization": "Bearer k"}
    async with serve(config, fake_engine("e0", model=MODEL)) as site:
        site.engine.script = Script(
            error=UnsupportedField("cannot compute embeddings", param="model")
        )
        for _ in range(4):
            assert (await site.send(PATH, body("abcdef"), headers=headers))[0] == 400
        site.engine.script = Script()
        answers = [await site.send(PATH, body("abcdef"), headers=headers) for _ in range(3)]
        assert [status for status, _ in answers] == [200, 200, 429]
