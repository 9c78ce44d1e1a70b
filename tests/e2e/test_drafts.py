"""The real embedded model drafts what it is told to expect, over HTTP, and says the same."""

from typing import Any

from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient

MESSAGES = [{"role": "user", "content": "Count from one to twelve in words."}]


async def ask(embedded_cluster: Cluster, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "embedded", "messages": MESSAGES, "temperature": 0} | fields
    async with HttpClient(embedded_cluster.core_url) as http:
        answer = await http.request("POST", "/v1/chat/completions", body=body)
    return answer["choices"][0]["message"]["content"], answer["usage"]


async def test_a_prediction_saves_steps_and_changes_nothing(embedded_cluster: Cluster) -> None:
    said, _ = await ask(embedded_cluster, max_tokens=40)
    prediction = {"type": "content", "content": said}
    again, usage = await ask(embedded_cluster, max_tokens=41, prediction=prediction)
    assert again.startswith(said)
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 10
    wrong = {"type": "content", "content": said[::-1]}
    other, _ = await ask(embedded_cluster, max_tokens=42, prediction=wrong)
    assert other.startswith(again)
