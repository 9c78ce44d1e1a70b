"""`parrot bench` over HTTP: real servers with simulated engines, and a scripted server with
OpenAI's API."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest

from parrot.cli.bench.openai_client import OpenAIProgram, OpenAITarget, openai_http
from parrot.cli.bench.plan import BenchJob, JobRunner, Plan
from parrot.cli.bench.program import Backend, Network, Program
from parrot.cli.bench.text import PromptText
from parrot.cli.bench.variables import GraphProgram
from parrot.cli.bench.workloads import WORKLOADS
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.support.app_server import running_in_thread, serve_app
from tests.support.command import failed, parrot
from tests.support.fake_openai import FakeOpenAI, Fault

SIM = {"engine_type": "sim", "model": "simulated", "instance": {"step_s": 0.001}}
WORDS = "one two three four five six seven eight"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(engines=[SIM]) as cluster:
        yield cluster


def measured(folder: Path, *args: str) -> tuple[str, dict[str, Any]]:
    """Run the command, and return its output and the contents of its result file."""
    path = folder / "figures.json"
    result = parrot("bench", *args, "--output", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads(path.read_text())


STREAMED = {
    *("map_reduce", "chain", "chain_many", "chain_background"),
    *("multi_agent", "copilot", "roots4", "mixed"),
}


def small(name: str) -> str:
    changes = {
        "multi_agent": "files=2",
        "copilot": "batch=3",
        "roots4": "batch=3",
        "gpts": "requests=4,rate=50",
        "mixed": "chats=2,chat_rate=50,applications=1",
        "chain_background": "seconds=0.5",
        "rag": "users=2,lead_s=0.1,gap_s=0.1",
        "tool_pause": "chats=2,turns=2,shortest_s=0.1,longest_s=0.2",
        "256": "requests=3",
        "job_mix": "jobs=4,rate=50",
    }
    return f"{name}:{changes[name]}" if name in changes else name


def test_requests_have_the_configured_lengths_and_prefix(cluster: Cluster, tmp_path: Path) -> None:
    lengths = ["--prompt_tokens", "400", "--prefix_tokens", "300", "--output_tokens", "16"]
    shown, report = measured(
        tmp_path,
        cluster.core_url,
        "--num_requests",
        "6",
        *lengths,
        "--concurrency",
        "1",
        "--seed",
        "3",
    )
    (row,) = report["results"]
    assert (row["completed"], row["failed"], row["unfinished"]) == (6, 0, 0)
    assert row["total_output_tokens"] == 6 * 16
    assert row["total_input_tokens"] == pytest.approx(6 * 400, rel=0.05)
    assert row["total_cached_tokens"] > 5 * 250  # The engine counts whole blocks.
    assert 0 < row["p50_ttft_ms"] <= row["p50_e2el_ms"] <= row["p99_e2el_ms"]
    assert row["request_throughput"] == pytest.approx(6 / row["duration"])
    for text in ("requests done", "TTFT p50", "TPOT p90", "ITL p99", "E2E p99", "of them cached"):
        assert text in shown
    assert report["parameters"]["prefix"] == 300
    assert f"--seed {report['seed']}" in shown


@pytest.mark.parametrize("name", [name for name, one in WORKLOADS.items() if one.is_application])
def test_an_application_runs_by_variables_and_by_plain_calls(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    # ServeCore runs equal calls only once. With these seeds, no texts in this file are equal.
    seed = str(list(WORKLOADS).index(name))
    shown, report = measured(tmp_path, cluster.core_url, "--workload", small(name), "--seed", seed)
    variables, plain = report["results"]
    assert (variables["style"], plain["style"]) == ("variables", "OpenAI API")
    for row in (variables, plain):
        assert row["completed"] == row["num_prompts"] > 0
        assert row["p50_e2el_ms"] > 0
        assert ("p50_ttft_ms" in row) == (name in STREAMED)
    assert variables["num_prompts"] == plain["num_prompts"]
    if name != "best_of_n":  # The tokens of the cancelled candidates depend on timing.
        for key in ("total_input_tokens", "total_output_tokens"):
            assert variables[key] == plain[key]
    assert "over first" in shown


def test_the_same_line_compares_with_another_server(cluster: Cluster, tmp_path: Path) -> None:
    fake = FakeOpenAI(reply=WORDS, cached_tokens=1)
    with running_in_thread(fake.app()) as url:
        args = ["--workload", "chain", "--against", f"{url}/v1", "--num_requests", "1"]
        _, report = measured(tmp_path, cluster.core_url, *args, "--repeat", "2", "--seed", "7")
    variables, other = report["results"]
    assert (variables["style"], variables["completed"]) == ("variables", 2)
    assert (other["url"], other["completed"], other["model_id"]) == (f"{url}/v1", 2, "gpt-fake")
    assert other["total_cached_tokens"] == 2 * 8
    assert report["seed"] == 7
    steps = [body for body in fake.bodies if body["max_tokens"] > 1]
    assert [bool(body.get("stream")) for body in steps] == [*[False] * 7, True] * 2
    assert WORDS in steps[1]["prompt"]
    assert steps[0]["prompt"] != steps[8]["prompt"]  # A server caches earlier prompts.


def test_a_seed_gives_the_same_requests_at_the_same_times(tmp_path: Path) -> None:
    prompts = []
    for _ in range(2):
        fake = FakeOpenAI(reply=WORDS)
        with running_in_thread(fake.app()) as url:
            args = ["--num_requests", "3", "--seed", "1", "--request_rate", "200", "--chat"]
            _, report = measured(tmp_path, url, *args)
        assert report["max_concurrency"] is None
        prompts.append([body["messages"] for body in fake.bodies])
    assert prompts[0] == prompts[1]


async def test_the_concurrency_is_limited() -> None:
    running, most = 0, 0

    async def run(program: Program) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1

    target = OpenAITarget(openai_http("http://nobody", None), "m")
    backend = Backend(lambda app: OpenAIProgram(target, Network()), target.http.close)
    runner = JobRunner(backend)
    await runner.run(Plan([BenchJob("job", run)] * 10, concurrency=3))
    assert most == 3
    assert [result.error for result in runner.results] == [None] * 10


class RecordedHttp(HttpClient):
    """Records the paths of its requests, without the ids."""

    paths: list[str]

    async def request(self, method: str, path: str, **options: Any) -> Any:
        self.paths.append("/".join(path.split("/")[:3]))
        return await super().request(method, path, **options)


@pytest.mark.parametrize("is_prepared", [False, True])
async def test_the_first_graph_opens_the_session(cluster: Cluster, is_prepared: bool) -> None:
    http = RecordedHttp(cluster.core_url)
    http.paths = []
    program = GraphProgram(ServeClient(http), Network(), "essay")
    if is_prepared:
        await program.prepare()
    for text in ("first", "second"):
        await program.read(program.call("write", [PromptText(f" {text} {is_prepared}", 2)], 3))
    rounds = ["/v1/semantic_graph", "/v1/semantic_var"]
    assert http.paths == [*["/v1/session"] * is_prepared, *rounds * 2]
    await program.end()
    await http.close()
    assert [usage.output_tokens for usage in program.account.usages] == [3, 3]


async def test_losing_candidates_are_disconnected() -> None:
    answer = Fault(200, {"choices": [{"text": "a"}]})
    fake = FakeOpenAI(hold=asyncio.Event(), faults=[answer])
    async with serve_app(fake.app()) as url:
        target = OpenAITarget(openai_http(url, None), "m")
        program = OpenAIProgram(target, Network())
        candidates = [
            program.call("candidate", [PromptText("a", 1)], 5, seed=seed) for seed in (1, 2)
        ]
        assert len(await program.read_first(candidates, 1)) == 1
        async with asyncio.timeout(10):
            await fake.cancelled.wait()
        await program.end()
        await target.http.close()


def counted(num_words: int) -> Fault:
    """Return an answer to one of the two requests that measure the number of tokens per word."""
    usage = {"prompt_tokens": num_words, "completion_tokens": 1}
    return Fault(200, {"choices": [{"text": "a"}], "usage": usage})


TRIED = [counted(16), counted(300)]


def test_failures_are_counted_and_reported(tmp_path: Path) -> None:
    error = {"error": {"message": "out of memory", "code": 500}}
    broken = [Fault(500, error), Fault(200, error, after_chunks=1), Fault(200, after_chunks=1)]
    fake = FakeOpenAI(reply=WORDS, faults=[*TRIED, *broken])
    with running_in_thread(fake.app()) as url:
        args = ("bench", url, "--num_requests", "5", "--concurrency", "1")
        result = parrot(*args, "--output", str(tmp_path / "f.json"))
        assert result.returncode == 0
        (row,) = json.loads((tmp_path / "f.json").read_text())["results"]
        assert (row["completed"], row["failed"]) == (2, 3)
        assert "HTTP 500: out of memory" in result.stderr
        assert "the stream broke off" in result.stderr
        fake.faults = [*TRIED, *[Fault(503, error)] * 5]
        assert "HTTP 503: out of memory" in failed(*args)


def test_a_request_that_takes_too_long_has_failed() -> None:
    fake = FakeOpenAI(reply=WORDS, hold=asyncio.Event(), faults=[*TRIED])
    with running_in_thread(fake.app()) as url:
        said = failed("bench", url, "--num_requests", "2", "--timeout", "0.3")
    assert "no answer within 0.3 s" in said


async def test_ctrl_c_shows_the_results_so_far(tmp_path: Path) -> None:
    fake = FakeOpenAI(reply=WORDS)
    path = tmp_path / "f.json"
    async with serve_app(fake.app()) as url:
        slow = ("--request_rate", "2", "--concurrency", "1", "--output", str(path))
        bench = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "parrot.cli", "bench", url, *slow),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await fake.wait_for_requests(4)  # one has ended, since requests are sent one by one
        finally:
            bench.send_signal(signal.SIGINT)
            out, _ = await bench.communicate()
    assert bench.returncode == 130
    report = json.loads(path.read_text())
    (row,) = report["results"]
    assert row["completed"] >= 1
    assert row["failed"] == 0
    assert row["completed"] + row["unfinished"] == 20
    assert not report["is_whole"]
    assert b"not finished" in out


def test_a_server_with_fewer_features_is_measured(tmp_path: Path) -> None:
    refusal = {"error": {"message": "unknown field: ignore_eos"}}
    fake = FakeOpenAI(reply=WORDS, counts_in_streams=False, faults=[Fault(400, refusal)])
    with running_in_thread(fake.app()) as url:
        shown, report = measured(tmp_path, url, "--num_requests", "2", "--output_tokens", "4")
    (row,) = report["results"]
    assert row["total_output_tokens"] == 8
    assert row["total_input_tokens"] is None
    assert "does not know `ignore_eos`" in shown
    assert not any("ignore_eos" in body for body in fake.bodies[1:])


def test_errors_for_wrong_inputs_say_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    url = cluster.core_url
    nobody = f"http://127.0.0.1:{free_port('127.0.0.1', set())}"
    for args, advice in (
        ([nobody], "`parrot up MODEL` starts a server"),
        (["nobody"], "not an http address: nobody; write it like http://localhost:9000"),
        ([url, "--against", nobody, "--workload", "chain"], "`parrot up MODEL` starts a server"),
        (
            [url, "--workload", "chess"],
            "unknown workload 'chess'; choose one of requests, map_reduce",
        ),
        ([url, "--workload", "chain:speed=2"], "chain has no parameter 'speed': factor, documents"),
        ([url, "--workload", "chain:chunk=x"], "chunk must be a number, not 'x'"),
        ([url, "--workload", "chain:chunk"], "'chunk' is not KEY=VALUE"),
        (
            [url, "--workload", "copilot:batch=999"],
            "`batch` is 999, but only 288 requests are recorded",
        ),
        (
            [url, "--workload", "chain", "--prefix_tokens", "3"],
            "--prefix_tokens is not an option of chain, which has --num_requests",
        ),
        ([url, "--prefix_tokens", "300"], "must be shorter than the prompt (256)"),
        ([url, "--model", "m"], "m is not served at http://127.0.0.1"),
        ([url, "--model", "m"], "--model accepts simulated"),
        ([url, "--output", str(tmp_path / "no" / "f.json")], "no such folder; give --output"),
    ):
        assert advice in failed("bench", *args)


def test_servers_without_openais_api_are_reported(tmp_path: Path) -> None:
    for fake, advice in (
        (FakeOpenAI(models=()), "serves no model yet"),
        (FakeOpenAI(models_status=404), "Its address usually ends in /v1"),
        (FakeOpenAI(models_status=401), "--api-key, or PARROT_KEY"),
        (FakeOpenAI(faults=[Fault(404, {"error": {"message": "no"}})] * 2), "--chat"),
    ):
        with running_in_thread(fake.app()) as url:
            assert advice in failed("bench", url)


def test_missing_keys_are_reported_and_given_keys_are_used(tmp_path: Path) -> None:
    with Cluster({"api_keys": ["k1"], "cluster_token": "t"}, [SIM]) as cluster:
        args = ("bench", cluster.core_url, "--workload", "map_reduce", "--num_requests", "1")
        assert "--api-key, or PARROT_KEY" in failed(*args)
        assert parrot(*args, PARROT_KEY="k1").returncode == 0


def test_a_service_without_an_engine_is_reported() -> None:
    with Cluster(engines=[]) as cluster:
        args = ("bench", cluster.core_url, "--workload", "chain")
        assert "no engine serves a model" in failed(*args)


SHARING = ["requests:prefix=100", "roots4", "map_reduce", "multi_agent"]


def on_two_servers(
    folder: Path, *args: str
) -> tuple[list[list[str]], list[list[str]], list[dict[str, Any]]]:
    """Run the command on two servers. Returns the words of each received prompt in order, and the
    figures of both servers."""
    first, second = FakeOpenAI(reply=WORDS), FakeOpenAI(reply=WORDS)
    with running_in_thread(first.app()) as url, running_in_thread(second.app()) as other:
        _, report = measured(folder, url, "--against", other, "--concurrency", "1", *args)
    ours, theirs = (
        [body["prompt"].split() for body in fake.bodies if body["max_tokens"] > 1]
        for fake in (first, second)
    )
    return ours, theirs, report["results"]


@pytest.mark.parametrize("name", SHARING)
def test_the_second_side_does_not_reuse_the_cache_of_the_first(tmp_path: Path, name: str) -> None:
    args = ("--workload", small(name), "--num_requests", "2", "--repeat", "2", "--seed", "2")
    ours, theirs, _ = on_two_servers(tmp_path, *args)
    assert len(ours) == len(theirs) > 1
    shared = [common_words(own, other) for own in ours for other in theirs]
    assert max(shared) <= 1  # A first word may be equal by chance.


@pytest.mark.parametrize("name", SHARING)
def test_both_sides_have_the_same_lengths_and_the_same_shared_prefixes(
    tmp_path: Path, name: str
) -> None:
    args = ("--workload", small(name), "--num_requests", "2")
    ours, theirs, rows = on_two_servers(tmp_path, *args)
    assert rows[0]["total_input_tokens"] == rows[1]["total_input_tokens"] > 0
    sizes = [sorted([len(word) for word in prompt] for prompt in side) for side in (ours, theirs)]
    assert sizes[0] == sizes[1]
    shared = [
        sorted(common_words(*pair) for pair in combinations(side, 2)) for side in (ours, theirs)
    ]
    assert shared[0] == shared[1]


def common_words(one: list[str], other: list[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
