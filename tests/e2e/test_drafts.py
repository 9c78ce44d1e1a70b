"""The real embedded model drafts what it is told to expect, over HTTP, and says the same."""

from collections.abc import Iterator
from typing import Any

import pytest

from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient

MESSAGES = [{"role": "user", "content": "Count from one to twelve in words."}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """`dtype` float32: greedy tokens must not depend on how the work is cut up."""
    with Cluster(engines=[{"model": "embedded", "dtype": "float32"}]) as running:
        yield running


async def ask(cluster: Cluster, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "embedded", "messages": MESSAGES, "temperature": 0} | fields
    async with HttpClient(cluster.core_url) as http:
        answer = await http.request("POST", "/v1/chat/completions", body=body)
    return answer["choices"][0]["message"]["content"], answer["usage"]


async def test_a_prediction_saves_steps_and_changes_nothing(cluster: Cluster) -> None:
    said, _ = await ask(cluster, max_tokens=40)
    prediction = {"type": "content", "content": said}
    again, usage = await ask(cluster, max_tokens=41, prediction=prediction)
    assert again.startswith(said)
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 10
    wrong = {"type": "content", "content": said[::-1]}
    other, _ = await ask(cluster, max_tokens=42, prediction=wrong)
    assert other.startswith(again)
