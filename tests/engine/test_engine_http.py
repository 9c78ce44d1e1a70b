"""An engine over real HTTP: verbs, errors, tokens, hostile bodies, disconnects."""

import asyncio
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import aclosing, asynccontextmanager, suppress

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import BuiltinConfig, HuggingFaceConfig, SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import DeviceLost, StepPlan, StepResult
from parrot.engine.engine_types import _load_model, create_service
from parrot.engine.http_server import main
from parrot.engine.service import RunnerService, ServiceState, ThreadDriver
from parrot.engine.sim import SimRunner, SimService, byte_tokenizer_response
from parrot.protocol.engine_api import EngineType, FillRequest, GenerateRequest, GenerateResponse
from parrot.protocol.engine_client import CORE_HEADER, CoreIdentity, EngineClient
from parrot.protocol.errors import (
    AuthenticationFailed,
    Cancelled,
    Conflict,
    EngineFailed,
    InvalidRequest,
    ModelNumerics,
    NotFound,
    PromptTooLong,
    StaleCore,
    Unavailable,
    UnsupportedField,
    ValidationFailed,
)
from parrot.protocol.http import HttpClient
from parrot.protocol.transport import until_done
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError
from tests.support.app_server import serve_app

ZERO = {"step_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}
SLOW = {**ZERO, "step_s": 0.002}
OPEN_PATHS = {"/health", "/ready"}
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def serving(service, config, token=None):
    await service.start()
    async with (
        serve_app(create_app(service, ReorderBuffer(MonotonicClock()), config)) as url,
        HttpClient(url, bearer_token=token) as http,
    ):
        yield EngineClient(http), http
    service.check_integrity()
    await service.close()


@asynccontextmanager
async def sim(instance=ZERO, token=None, **keys):
    config = SimConfig(instance=instance, **keys)
    service = SimService(config)
    async with serving(service, config, token) as (client, http):
        yield client, http, service


def request(context_id=1, text="hello", length=5, **fields) -> GenerateRequest:
    sampling = {"max_gen_length": length, **fields.pop("sampling", {})}
    fills = [{"context_id": context_id, "token_ids": list(text.encode())}]
    return GenerateRequest.model_validate(
        {"context_id": context_id, "fills": fills, "sampling_config": sampling, **fields}
    )


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is another thread's
            await asyncio.sleep(0.005)


async def test_every_verb():
    async with sim() as (client, _, _):
        assert (await client.fill(FillRequest(context_id=1, token_ids=[97] * 20))).filled_len == 20
        answer = await client.generate(
            GenerateRequest(
                context_id=2, parent_context_id=1, sampling_config={"max_gen_length": 3}
            )
        )
        assert len(answer.generated_ids) == 3
        assert answer.usage.cached_tokens == 20
        info = await client.ping()
        assert info.num_steps == 4
        assert (await client.tokenizer()).vocab_size == 259
        assert await client.free_contexts([1, 2, 3]) == 20 + 23


async def test_streaming():
    async with sim() as (client, _, _):
        events = [event async for event in client.generate_stream(request(length=6))]
        assert isinstance(events[-1], GenerateResponse)
        assert "".join(e.text for e in events[:-1]) == events[-1].generated_text
        with pytest.raises(PromptTooLong):
            await anext(client.generate_stream(request(2, "x" * 40_000)))


async def collect(chunks):
    return [chunk async for chunk in chunks]


async def test_a_follower_gets_the_generation_from_its_first_token():
    async with sim(SLOW) as (client, _, service):
        early = asyncio.create_task(collect(client.follow(1)))  # It waits for the generation.
        other = asyncio.create_task(collect(client.follow(7)))  # There is no such generation.
        whole = asyncio.create_task(client.generate(request(length=200)))
        await until(lambda: service.runtime_info().num_steps > 50)
        late = asyncio.create_task(collect(client.follow(1)))
        answer = await whole
        for chunks in await early, await late:
            assert "".join(chunk.text for chunk in chunks) == answer.generated_text
            assert [i for chunk in chunks for i in chunk.ids] == answer.generated_ids
        assert len(await early) > len(await late) > 20
        other.cancel()
        assert (await client.generate(request(2))).generated_ids


async def test_a_follower_ends_when_the_generation_is_cancelled():
    async with sim(SLOW) as (client, _, service):
        whole = asyncio.create_task(client.generate(request(length=2000)))
        await until(lambda: service.runtime_info().num_steps > 5)
        follower = client.follow(1)
        assert (await anext(follower)).ids
        whole.cancel()
        await collect(follower)  # The stream ends.
        await until(lambda: service.runtime_info().num_total_jobs == 0)


async def test_outputs_are_sent_on_a_channel():
    async with sim(SLOW) as (client, _, service):
        found = {i: [] for i in range(1, 9)}
        wanted = [request(i, length=20, sampling={"logprobs": i % 2 or None}) for i in found]
        answers = await asyncio.gather(
            *(client.generate(w, found[w.context_id].append) for w in wanted)
        )
        await until(lambda: all(sum(len(c.ids) for c in chunks) == 20 for chunks in found.values()))
        for chunks, answer in zip(found.values(), answers, strict=True):
            assert "".join(chunk.text for chunk in chunks) == answer.generated_text
            assert [i for chunk in chunks for i in chunk.ids] == answer.generated_ids
            assert len(chunks) > 10
            has_logprobs = {chunk.logprobs is not None for chunk in chunks}
            assert has_logprobs == {answer.logprobs is not None}
        cancelled = asyncio.create_task(client.generate(request(20, length=2000), found[1].append))
        await until(lambda: service.runtime_info().num_total_jobs == 1)
        cancelled.cancel()
        await until(lambda: service.runtime_info().num_total_jobs == 0)
        with pytest.raises(PromptTooLong):
            await client.generate(request(21, "x" * 40_000), found[1].append)
        await client.close()


async def test_a_channel_can_be_opened_once_and_gets_only_its_own_outputs():
    async with sim() as (client, http, _):
        body = {"channel": "a"}
        async with aclosing(http.stream("POST", "/channel", body=body)) as events:
            assert await anext(events) == ("open", b" {}")
            with pytest.raises(Conflict):
                await collect(until_done(http.stream("POST", "/channel", body=body)))
            answer = await client.generate(request(1, channel="b"))
            await client.generate(request(2, channel="a"))
            name, data = await anext(events)
            assert name == "chunks"
            assert {c["context_id"] for c in json.loads(data)["chunks"]} == {2}
        assert len(answer.generated_ids) == 5
        await until_closed(http, body)


async def until_closed(http, body):
    """Wait until the server has noticed that the client of a channel has disconnected."""
    async with asyncio.timeout(10):
        while True:
            with suppress(Conflict):
                async with aclosing(
                    until_done(http.stream("POST", "/channel", body=body))
                ) as found:
                    assert (await anext(found))[0] == "open"
                    return


async def test_closed_channels_end():
    config = SimConfig(instance=ZERO)
    service = SimService(config)
    app = create_app(service, ReorderBuffer(MonotonicClock()), config)
    await service.start()
    async with serve_app(app) as url, HttpClient(url) as http:
        events = http.stream("POST", "/channel", body={"channel": "a"})
        assert (await anext(events))[0] == "open"
        app.state.front.channels.close()
        assert [name for name, _ in await collect(events)] == ["done"]
    await service.close()


async def test_log_probabilities_are_equal_in_streams_and_answers():
    async with sim() as (client, _, _):
        wanted = request(length=6, sampling={"logprobs": 3})
        events = [event async for event in client.generate_stream(wanted)]
        again = await client.generate(request(2, length=6, sampling={"logprobs": 3}))
        assert (len(again.logprobs), again.logprobs.width) == (6, 4)
        assert events[-1].logprobs == again.logprobs
        assert [list(e.logprobs.ids[::4]) for e in events[:-1]] == [e.ids for e in events[:-1]]
        assert (await client.generate(request(3))).logprobs is None


async def test_free_context_also_accepts_a_single_id():
    async with sim() as (client, http, _):
        await client.fill(FillRequest(context_id=1, token_ids=[97] * 20))
        assert await http.request("POST", "/free_context", body={"context_id": 1}) == {
            "context_len": 20
        }
        for nothing in ({}, {"context_id": None}):
            with pytest.raises(ValidationFailed):
                await http.request("POST", "/free_context", body=nothing)


async def test_typed_errors_reach_the_client():
    async with sim() as (client, _, _):
        with pytest.raises(PromptTooLong):
            await client.generate(request(text="x" * 40_000))
        with pytest.raises(UnsupportedField) as error:
            await client.generate(request(sampling={"n": 2}))
        assert error.value.param == "n"
        with pytest.raises(InvalidRequest, match="259 is outside of the vocabulary") as error:
            await client.generate(request(sampling={"logit_bias": {"259": 1.0}}))
        assert error.value.param == "logit_bias"
        with pytest.raises(NotFound):
            await client.fill(FillRequest(context_id=1, parent_context_id=7, token_ids=[1]))


async def test_a_piece_without_a_context_id_writes_the_requests_context():
    async with sim() as (client, http, _):
        await client.fill(FillRequest(context_id=1, token_ids=list(b"once upon")))
        fork = {"context_id": 2, "parent_context_id": 1, "parent_len": 4}
        pieces = [{"token_ids": list(b" a")}, {"token_ids": list(b" time")}]
        forked = await http.request("POST", "/generate", body={**fork, "fills": pieces})
        whole = await client.generate(request(3, "once a time", length=512))
        assert forked["generated_ids"] == whole.generated_ids
        assert forked["usage"]["cached_tokens"] == 4


async def test_a_piece_must_not_create_the_context_without_the_parent_of_the_request():
    async with sim() as (client, http, _):
        await client.fill(FillRequest(context_id=1, token_ids=list(b"once upon")))
        body = {
            "context_id": 2,
            "parent_context_id": 1,
            "fills": [{"context_id": 2, "token_ids": list(b" a time")}],
        }
        with pytest.raises(InvalidRequest, match="context 2") as error:
            await http.request("POST", "/generate", body=body)
        assert (error.value.status, error.value.param) == (400, "parent_context_id")
        assert await client.free_contexts([2]) == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"context_id": NaN}', 400),
        (b'{"context_id": 1, "fills": [{"context_id": 1, "text": "\\ud800"}]}', 400),
        (b"[" * 100_000 + b"]" * 100_000, 400),
        (b"\xff\xfe", 400),
        (b"{}", 422),
        (b"[]", 422),
        (b'{"context_id": "1e999"}', 422),
        (b'{"context_id": -5}', 422),
        (b'{"context_id": 1, "fills": [{"context_id": 1, "token_ids": [-1]}]}', 422),
        (b'{"context_id": 1, "fills": [{"context_id": 1, "token_ids": [2147483648]}]}', 422),
        (b'{"context_id": 1, "fills": [{"context_id": 1, "token_ids": [400]}]}', 400),
        (b'{"context_id": 1, "sampling_config": {"max_gen_length": 0}}', 422),
        (b'{"context_id": 1}', 400),
    ],
)
async def test_hostile_bodies_get_json_errors_and_the_engine_still_serves(body, status):
    async with sim() as (client, http, _), aiohttp.ClientSession(headers=JSON) as session:
        async with session.post(f"{http.base_url}/generate", data=body) as response:
            assert response.status == status
            assert "message" in (await response.json())["error"]
        assert len((await client.generate(request(9))).generated_ids) == 5


async def test_a_body_that_is_too_large_is_refused():
    async with sim() as (client, http, _), aiohttp.ClientSession(headers=JSON) as session:
        # The server may close the connection while the client still sends.
        with suppress(aiohttp.ClientError):
            async with session.post(
                f"{http.base_url}/fill", data=io.BytesIO(b" " * (65 * 2**20))
            ) as response:
                assert response.status == 413
        assert (await client.ping()).num_steps == 0


async def test_unknown_paths_and_methods():
    async with sim() as (_, http, _), aiohttp.ClientSession() as session:
        async with session.get(f"{http.base_url}/nothing") as response:
            assert response.status == 404
        async with session.get(f"{http.base_url}/generate") as response:
            assert response.status == 405
            assert (await response.json())["error"]["type"] == "method_not_allowed"


async def test_the_openapi_page_documents_every_route():
    async with sim() as (_, http, _):
        paths = (await http.request("GET", "/openapi.json"))["paths"]
    assert {path for path in paths if "post" in paths[path]} == {
        *("/fill", "/generate", "/generate_stream", "/follow", "/embed", "/score", "/free_context"),
        *("/ping", "/channel"),
    }
    assert {path for path in paths if "get" in paths[path]} == {
        *("/tokenizer", "/health", "/ready", "/metrics")
    }
    streamed = paths["/generate_stream"]["post"]["responses"]["200"]["content"]
    assert [*streamed] == ["text/event-stream"]


async def test_the_cluster_token_guards_every_route_but_two():
    async with sim(cluster_token="s3cret") as (client, http, service):
        with pytest.raises(AuthenticationFailed):
            await client.ping()
        paths = {
            route.path
            for route in create_app(service, ReorderBuffer(MonotonicClock()), SimConfig()).routes
        }
        assert {"/generate", "/metrics", *OPEN_PATHS} <= paths
        async with aiohttp.ClientSession() as session:
            for path in paths:
                for method in ("GET", "POST"):
                    async with session.request(method, http.base_url + path) as response:
                        assert (response.status == 401) == (path not in OPEN_PATHS), path
    async with sim(token="s3cret", cluster_token="s3cret") as (client, _, _):
        assert (await client.ping()).num_steps == 0


async def test_a_core_that_started_earlier_can_take_an_engine_over():
    """ServeCore requests the tokenizer before the engine has the answer to its registration."""
    service = SimService(config := SimConfig(instance=ZERO))
    await service.start()
    app = create_app(service, ReorderBuffer(MonotonicClock()), config)
    app.state.front.fence.registered(CoreIdentity(2, "late"))
    async with serve_app(app) as url:
        headers = {CORE_HEADER: CoreIdentity(1, "early").header}
        async with HttpClient(url, headers=headers) as http:
            client = EngineClient(http)
            assert await client.tokenizer() == service.tokenizer()
            with pytest.raises(StaleCore):
                await client.free_contexts([1])
    await service.close()


async def test_health_ready_and_metrics():
    async with sim() as (client, http, service), aiohttp.ClientSession() as session:
        assert await http.request("GET", "/health") == {}
        assert await http.request("GET", "/ready") == {}
        async with session.get(f"{http.base_url}/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            families = list(text_string_to_metric_families(await response.text()))
        assert all(family.documentation for family in families)
        values = {sample.name: sample.value for family in families for sample in family.samples}
        assert values["parrot_engine_kv_blocks_free"] == 8192
        assert {family.name: family.type for family in families}["parrot_engine_steps"] == "counter"
        await service.close()
        with pytest.raises(Unavailable):
            await http.request("GET", "/ready")
        with pytest.raises(Unavailable):
            await client.generate(request())
        assert await http.request("GET", "/health") == {}


async def test_a_client_that_disconnects_aborts_its_request():
    async with sim(SLOW) as (client, _, service):
        task = asyncio.ensure_future(client.generate(request(length=100_000 // 4)))
        await until(lambda: service.runtime_info().num_steps > 3)
        task.cancel()
        await until(lambda: service.runtime_info().num_total_jobs == 0)
        stream = client.generate_stream(request(2, length=100_000 // 4))
        await anext(stream)
        await stream.aclose()
        await until(lambda: service.runtime_info().num_total_jobs == 0)
        await client.free_contexts([1, 2])
        info = await client.ping()
        assert info.num_free_blocks == info.num_max_blocks


async def test_freeing_ends_a_running_request_with_its_error():
    async with sim(SLOW) as (client, _, service):
        task = asyncio.ensure_future(client.generate(request(length=10_000)))
        await until(lambda: service.runtime_info().num_steps > 3)
        assert await client.free_contexts([1]) > 5
        with pytest.raises(Cancelled):
            await task


async def test_a_hundred_requests_at_once():
    async with sim(scheduler={"max_batch_size": 7}) as (client, _, service):
        answers = await asyncio.gather(*(client.generate(request(i)) for i in range(100)))
        assert len({answer.generated_text for answer in answers}) == 1
        assert await client.free_contexts(range(100)) == 100 * 10
        service.check_integrity()


# Tests of the thread driver, with a runner that fails on purpose.


class FaultyRunner(SimRunner):
    """Crashes on `!`. Logits are not finite after a context that contains `?`."""

    def run(self, plan):
        assert threading.current_thread().name == "engine-core"
        if any(ord("!") in sequence.token_ids for sequence in plan.sequences):
            raise RuntimeError("!")
        result = super().run(plan)
        samples = [sequence.sample for sequence in plan.sequences if sequence.sample]
        for sample in samples:
            if ord("?") in sample.context_ids:
                del result.tokens[sample.job_id]
                result.errors[sample.job_id] = ModelNumerics("the logits are not finite")
        return result


def threaded(**keys) -> tuple[RunnerService, SimConfig]:
    config = SimConfig(instance=ZERO, **keys)

    def load() -> EngineCore:
        runner = FaultyRunner(config.instance, MonotonicClock())
        return EngineCore(config, runner, Language.of(byte_tokenizer_response()), MonotonicClock())

    return RunnerService(config, ThreadDriver(load), warm_up=True), config


async def test_a_threaded_engine_serves_and_survives_a_crash():
    service, config = threaded()
    async with serving(service, config) as (client, _):
        assert (await client.ping()).num_steps > 0  # The warm-up ran steps.
        assert (await client.ping()).num_free_blocks == 8192
        good = [client.generate(request(i)) for i in range(20)]
        bad = client.generate(request(99, "a!"))
        *answers, error = await asyncio.gather(*good, bad, return_exceptions=True)
        assert len({answer.generated_text for answer in answers}) == 1
        assert isinstance(error, EngineFailed)
        events = [e async for e in client.generate_stream(request(100, length=50))]
        assert len(events[-1].generated_ids) == 50
        assert await client.free_contexts(range(101)) > 0
        assert (await client.ping()).num_free_blocks == 8192


async def test_logits_that_are_not_finite_fail_only_their_own_request():
    service, config = threaded()
    async with serving(service, config) as (client, _):
        good = [client.generate(request(i)) for i in range(20)]
        bad = client.generate(request(99, "a?"))
        *answers, error = await asyncio.gather(*good, bad, return_exceptions=True)
        assert type(error) is ModelNumerics
        assert {len(answer.generated_ids) for answer in answers} == {5}
        with pytest.raises(ModelNumerics):
            async for _ in client.generate_stream(request(98, "?")):
                pass
        assert await client.free_contexts(range(100)) > 0
        assert (await client.ping()).num_free_blocks == 8192


async def test_a_threaded_engine_aborts_and_closes_while_it_works():
    service, config = threaded()
    async with serving(service, config) as (client, _):
        first = asyncio.ensure_future(client.generate(request(1, length=30_000)))
        second = asyncio.ensure_future(client.generate(request(2, length=30_000)))
        await until(lambda: service.runtime_info().num_total_jobs == 2)
        first.cancel()
        await until(lambda: service.runtime_info().num_total_jobs == 1)
        await service.close()
        with pytest.raises(Unavailable):
            await second


async def test_an_engine_that_has_lost_its_device_is_not_ready_and_fails_all_requests(monkeypatch):
    service, config = threaded()
    async with serving(service, config) as (client, _):
        assert service.state() is ServiceState.READY

        def lose(plan: StepPlan) -> StepResult:
            raise DeviceLost("an illegal access")

        monkeypatch.setattr(service._core._runner, "run", lose)
        answers = [client.generate(request(i)) for i in range(3)]
        errors = await asyncio.gather(*answers, return_exceptions=True)
        assert {type(error) for error in errors} == {Unavailable}
        assert service.state() is ServiceState.LOST
        with pytest.raises(Unavailable, match="lost its device"):
            await client.generate(request(5))


async def test_start_raises_the_error_of_loading():
    def load() -> EngineCore:
        raise FileNotFoundError("no such model")

    service = RunnerService(SimConfig(), ThreadDriver(load), warm_up=True)
    with pytest.raises(FileNotFoundError):
        await service.start()
    await service.close()


async def test_an_exception_in_the_core_fails_only_current_requests(monkeypatch):
    service, config = threaded()
    async with serving(service, config) as (client, _):
        core = service._core
        step = core.step
        monkeypatch.setattr(core, "step", lambda: 1 / 0)
        with pytest.raises(EngineFailed, match="internal error"):
            await client.generate(request())
        monkeypatch.setattr(core, "step", step)
        assert len((await client.generate(request(2))).generated_ids) == 5


async def test_the_service_is_of_the_configured_type():
    service = create_service(SimConfig())
    assert service.state() is not ServiceState.READY
    await service.start()
    assert service.engine_info().engine_type is EngineType.SIM
    await service.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def run_engine(tmp_path, payload: str) -> subprocess.Popen[str]:
    path = tmp_path / "engine.json"
    path.write_text(payload)
    command = [sys.executable, "-m", "parrot.engine.http_server", "--without_core"]
    return subprocess.Popen(
        [*command, "--config_path", str(path)], stderr=subprocess.PIPE, text=True
    )


def test_the_process_logs_that_it_is_ready_and_exits_cleanly(tmp_path):
    payload = f'{{"engine_type": "sim", "port": {free_port()}}}'
    with run_engine(tmp_path, payload) as process:
        lines = iter(process.stderr.readline, "")
        assert any("sim:" in line and "is ready" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize("delay_s", [0.3, 1.3])
def test_a_process_that_is_loading_its_model_exits_cleanly(tmp_path, delay_s):
    pytest.importorskip("torch")
    with run_engine(tmp_path, f'{{"model": "embedded", "port": {free_port()}}}') as process:
        lines = iter(process.stderr.readline, "")
        assert any("loading embedded" in line for line in lines)
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert "Traceback" not in stderr


def test_a_process_whose_model_cannot_be_loaded_exits_with_the_reason(tmp_path):
    pytest.importorskip("torch")
    payload = f'{{"model": "/nonexistent/model", "port": {free_port()}}}'
    with run_engine(tmp_path, payload) as process:
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 1
        assert "Traceback" not in stderr


def test_without_torch_the_error_names_the_missing_package(monkeypatch):
    for name in [*sys.modules]:
        if name.startswith(("parrot.engine.runner.load", "parrot.engine.huggingface")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    for engine_type in (BuiltinConfig, HuggingFaceConfig):
        with pytest.raises(
            ConfigError, match=r"(?s)needs torch, which is not installed; .*pip install"
        ):
            _load_model(engine_type())


def test_an_invalid_config_ends_the_command_with_an_error(tmp_path):
    path = tmp_path / "engine.json"
    path.write_text('{"engine_type": "sim", "prot": 1}')
    with pytest.raises(SystemExit, match="unknown key `prot`"):
        main(["--config_path", str(path)])
    with pytest.raises(SystemExit, match="`device`"):
        main(["--device", "tpu"])
