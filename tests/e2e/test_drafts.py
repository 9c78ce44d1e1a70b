"""The real embedded model drafts from a prediction, from the inputs of a call, and from earlier
outputs of its function. The output does not change."""

from typing import Any

from parrot import P
from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient

GREEDY = P.SamplingConfig(temperature=0, max_gen_length=40)
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


@P.semantic_function()
def revise(version: P.Input, revised: P.Output(GREEDY)):
    """The text: {{version}}
    The text once more, after a small change: one, two, {{revised}}"""


@P.semantic_function()
def count(line: P.Input, words: P.Output(GREEDY)):
    """Line {{line}}. Count in words: one, two, three, {{words}}"""


def test_a_call_drafts_from_its_inputs(embedded_cluster: Cluster) -> None:
    """Each version is generated from the previous version."""
    text = "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve."
    with P.VirtualMachine(embedded_cluster.core_url).running_scope():
        first = revise(text)
        second = revise(first)
        for revised in (first, second):
            revised.get()
            assert revised.usage is not None
            assert revised.usage.accepted_tokens > 10


def test_a_call_drafts_from_earlier_outputs_of_its_function(embedded_cluster: Cluster) -> None:
    with P.VirtualMachine(embedded_cluster.core_url).running_scope():
        said, accepted = [], []
        for line in ("one", "two"):
            words = count(line)
            said.append(words.get())
            assert words.usage is not None
            accepted.append(words.usage.accepted_tokens)
        assert said[0] == said[1]
        assert accepted[1] > accepted[0] + 10
