"""Graphs in one request, and chained chats, on the real embedded model."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from parrot import P
from parrot.cluster import Cluster

GREEDY = P.SamplingConfig(temperature=0, max_gen_length=8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Without reuse: what is compared must have been computed."""
    core = {"global_scheduler": {"reuse_results": False}}
    with Cluster(core=core, engines=[{"model": "embedded", "dtype": "float32"}]) as running:
        yield running


@P.semantic_function()
def about(text: P.Input, summary: P.Output(GREEDY)):
    """Text: {{text}}
    In short: {{summary}}"""


@P.native_function()
def shout(text: P.Input, loud: P.Output):
    loud.set(text.strip().upper() + "!")


def test_a_batch_gives_the_texts_of_its_calls_one_by_one(cluster: Cluster) -> None:
    topics = ["birds", "trains", "rain"]
    vm = P.VirtualMachine(cluster.core_url)
    with vm.running_scope():
        summaries = [about(topic) for topic in topics]
        wanted = P.gather([*summaries, shout(about(summaries))])
    with vm.running_scope():
        with vm.batch():
            summaries = vm.map(about, topics)
            loud = shout(about(summaries))
        assert P.gather([*summaries, loud]) == wanted


def ask(cluster: Cluster, content: str, **parrot: Any) -> Any:
    body = {
        "model": "embedded",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "prompt_cache_key": "chained",
        "parrot": parrot,
    }
    request = urllib.request.Request(
        f"{cluster.core_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_chained_chat_says_what_each_of_its_turns_says(cluster: Cluster) -> None:
    first = ask(cluster, "Name a bird.", defer=True)
    (name,) = first["parrot"]["outputs"]
    second = ask(cluster, "{{bird}}", inputs={"bird": name})
    alone = ask(cluster, "Name a bird.")["choices"][0]["message"]["content"]
    assert alone
    third = ask(cluster, alone)
    assert second["choices"][0]["message"] == third["choices"][0]["message"]
    assert second["usage"]["prompt_tokens"] > 0
