"""The processes of an engine with tensor parallelism end together."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parrot.cluster import Cluster
from tests.support.processes import children, is_running, needs_proc
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(300), needs_proc]
PATIENCE_S = 60.0
NO_REUSE = {"global_scheduler": {"reuse_cache_size": 0}}


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def complete(cluster: Cluster) -> str:
    body = {"model": "divided", "prompt": "Once", "max_tokens": 60, "temperature": 0}
    request = urllib.request.Request(
        f"{cluster.core_url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text: str = json.loads(answer.read())["choices"][0]["text"]
    return text


def test_ranks_end_together_and_their_calls_are_retried(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    engine = {
        "model": str(make_tiny_model(tmp_path / "model", overrides=sizes)),
        "served_model_name": "divided",
        "dtype": "float32",
        "device": "cpu",
        "heartbeat_interval": 0.2,
        "instance": {"tensor_parallel": 2, "num_kv_cache_blocks": 64, "num_threads": 1},
    }
    with Cluster(NO_REUSE, [engine]) as cluster, ThreadPoolExecutor() as pool:
        want = complete(cluster)
        process = cluster.process("engine-0")
        (rank,) = children(process.pid)
        os.kill(rank, signal.SIGSTOP)  # the call cannot end now
        call = pool.submit(complete, cluster)
        assert eventually(lambda: is_busy(cluster)), "the call has not started"
        os.kill(rank, signal.SIGKILL)
        assert cluster.wait_death(PATIENCE_S) is process
        assert "rank 1 has ended" in cluster.log("engine-0")
        cluster.restart("engine-0")
        assert call.result(PATIENCE_S) == want

        process = cluster.process("engine-0")
        (rank,) = children(process.pid)
        os.kill(process.pid, signal.SIGKILL)  # not its process group
        assert eventually(lambda: not is_running(rank))
        cluster.restart("engine-0")
        cluster.wait_ready()
        process = cluster.process("engine-0")
        (rank,) = children(process.pid)
    assert not is_running(rank)


def is_busy(cluster: Cluster) -> bool:
    token = cluster.cluster_token
    request = urllib.request.Request(
        f"{cluster.url('engine-0')}/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    running = [line for line in lines if line.startswith("parrot_engine_num_requests_running{")]
    ranks = [line for line in lines if line.startswith("parrot_engine_ranks{")]
    assert [line.rpartition(" ")[2] for line in ranks] == ["2.0"]
    return running[0].rpartition(" ")[2] == "1.0"
