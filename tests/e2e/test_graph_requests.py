"""Graphs in one request, and chained chats, on the real embedded model."""

import json
import urllib.request
from typing import Any

from parrot import P
from parrot.cluster import Cluster

GREEDY = P.SamplingConfig(temperature=0, max_gen_length=8)


@P.semantic_function()
def about(text: P.Input, summary: P.Output(GREEDY)):
    """Text: {{text}}
    In short: {{summary}}"""


@P.native_function()
def shout(text: P.Input, loud: P.Output):
    loud.set(text.strip().upper() + "!")


def test_a_batch_gives_the_texts_of_its_calls_one_by_one(embedded_cluster: Cluster) -> None:
    topics = ["birds", "trains", "rain"]
    vm = P.VirtualMachine(embedded_cluster.core_url)
    with vm.running_scope():
        summaries = [about(topic) for topic in topics]
        wanted = P.gather([*summaries, shout(about(summaries))])
    with vm.running_scope():
        with vm.batch():
            summaries = vm.map(about, topics)
            loud = shout(about(summaries))
        assert P.gather([*summaries, loud]) == wanted


def ask(embedded_cluster: Cluster, content: str, **parrot: Any) -> Any:
    body = {
        "model": "embedded",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "prompt_cache_key": "chained",
        "parrot": parrot,
    }
    request = urllib.request.Request(
        f"{embedded_cluster.core_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_chained_chat_gives_the_texts_of_its_turns_one_by_one(embedded_cluster: Cluster) -> None:
    first = ask(embedded_cluster, "Name a bird.", defer=True)
    (name,) = first["parrot"]["outputs"]
    second = ask(embedded_cluster, "{{bird}}", inputs={"bird": name})
    alone = ask(embedded_cluster, "Name a bird.")["choices"][0]["message"]["content"]
    assert alone
    third = ask(embedded_cluster, alone)
    assert second["choices"][0]["message"] == third["choices"][0]["message"]
    assert second["usage"]["prompt_tokens"] > 0
