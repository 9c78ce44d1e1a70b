"""Each benchmark of the simulated service runs, with a few calls."""

import asyncio
import importlib
import json

import aiohttp
import pytest

from benchmark.results import run
from benchmark.serve.bench_in_front import server, until_ready
from parrot.cluster import Cluster
from tests.support.postgres import Server

TINY = {
    "bench_placement": [
        "fanout_cold --siblings 2 --prefix 256 --answer 4",
        "mixed --chats 2 --apps 1 --document 2048 --answer 4 --seeds 0 --fixed 1",
        "gpts --rates 2 --seconds 2 --seeds 0",
    ],
    "bench_kv": [
        "dag --chats 2 --turns 4 --warm-up 1 --duration 30",
        "tool_pause --chats 2 --warm-up 10 --duration 90 --oversubscription 1",
    ],
    "bench_reuse": ["--seeds 1 --programs 1 --jobs 1 --parts 2 --turns 1 --calls 5"],
    "bench_eager": ["--programs 1 --bystanders 0"],
    "bench_simulation": ["--engines 2 --tasks 10"],
    "bench_scheduler": ["--engines 2 --tasks 20"],
    "bench_tenants": ["--crowd 30 --settle 0.5 --turns 1 --kinds latency --queries 100"],
    "tests.scale.bench_shards": ["--calls 20 --turns 1 --concurrency 4 --reads 5"],
    "tests.scale.bench_size": ["--engines 2 --calls 20 --sessions 2"],
    "tests.scale.simulate": [
        "--part division --shards 4 --tenants 9",
        "--part windows --shards 3 --sampled 2 --engines 1 --tenants 3 --warm_up 3 --measured 3",
        "--part fullest --shards 3 --engines 1 --tenants 5 --warm_up 3 --measured 3",
        "--part failures --shards 1 --engines 2 --tenants 3 --warm_up 3 --measured 3",
    ],
    "tests.scale.day": [
        "--part hours --shards 2 --engines 1 --tenants 3 --hour_s 3 --first 9 --last 11",
        "--part division --shards 3 --engines 1 --tenants 3 --hour_s 5",
        "--part takeover --shards 1 --engines 2 --tenants 3 --warm_up 3 --measured 10 --down 2",
    ],
    "bench_journal": ["--calls 4 --submits 2 --turns 2 --concurrency 2 --sessions 3"],
    "bench_front_door": ["--tokens 200 --new 50 --turns 2 --warm-up 1"],
    "bench_in_front": ["--requests 4 --streams 4"],
    "bench_telemetry": [
        "--counted 20 --sessions 2 --concurrency 2 --turns 2 --scraped-turns 2 --step-s 0.001"
    ],
    "bench_page": ["--viewers 1 --concurrency 2 --calls 10 --turns 2 --step-s 0.001"],
    "benchmark.agents.bench_replay": [
        "--rows lru all --agents 3 --scale 0.02 --warm-up 20 --duration 60",
    ],
    "bench_reads": ["--turns 1"],
    "bench_streams": ["--streams 3 --tokens 64 --rounds 1"],
}
COMMANDS = [(module, command) for module, commands in TINY.items() for command in commands]


@pytest.mark.parametrize(("module", "command"), COMMANDS)
def test_a_tiny_run_gives_a_report(module, command, tmp_path):
    path = tmp_path / "result.json"
    name = module if "." in module else f"benchmark.serve.{module}"
    importlib.import_module(name)
    run(name, [*command.split(), "--output", str(path)])
    report = json.loads(path.read_text())
    assert report["provenance"]["command"].startswith(f"python -m {name} {command}")
    assert len(report) > 1


async def until_served(url):
    async with aiohttp.ClientSession() as http:
        await until_ready(http, url)


def test_programs_in_front_of_a_server_are_measured(tmp_path):
    with server("instant_server") as direct:
        core = {"host": "127.0.0.1", "servers": [{"url": f"{direct}/v1"}]}
        with Cluster(core, []) as cluster:
            asyncio.run(until_served(cluster.core_url))
            urls = f"--parrot {cluster.core_url} --server {direct}/v1"
            command = f"{urls} --only map_reduce --num-requests 2 --repeat 1"
            test_a_tiny_run_gives_a_report("in_front_programs", command, tmp_path)
    rows = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert [row["client"] for row in rows] == ["pfunc", "pfunc_batch", "graph", "plain", "openai"]
    assert {(row["completed"], row["failed"], row["reused"]) for row in rows} == {(2, 0, 0)}


def test_a_takeover_is_measured(postgres: Server, tmp_path):
    command = f"--journal {postgres.database()} --how killed --rounds 1 --sessions 1"
    test_a_tiny_run_gives_a_report("bench_takeover", command, tmp_path)
