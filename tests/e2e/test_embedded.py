"""Programs on the real embedded model: PFunc, ServeCore and the builtin engine together."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import BaseModel, Field

from parrot import P
from parrot.cluster import Cluster
from parrot.protocol.errors import Cancelled, NativeFunctionFailed, PromptTooLong
from parrot.utils.ids import new_token
from tests.support.command import parrot

GREEDY = P.SamplingConfig(temperature=0, max_gen_length=12)


@pytest.fixture
def vm(embedded_cluster: Cluster) -> P.VirtualMachine:
    return P.VirtualMachine(embedded_cluster.core_url)


@P.semantic_function(conversation_template=P.chat_template)
def capital(country: P.Input, city: P.Output(GREEDY)):
    """What is the capital of {{country}}? Answer with one word. {{city}}"""


@P.semantic_function()
def joke(topic: P.Input, punchline: P.Output(GREEDY), why: P.Output(GREEDY)):
    """A joke about {{topic}}: {{punchline}} It is funny because {{why}}"""


@P.semantic_function()
def about(text: P.Input, summary: P.Output(GREEDY)):
    """Text: {{text}}
    In short: {{summary}}"""


@P.native_function()
def shout(text: P.Input, loud: P.Output):
    loud.set(text.strip().upper() + "!")


@P.native_function()
def divide(text: P.Input, out: P.Output):
    out.set(str(1 / 0))


@P.native_function(timeout=0.3)
def spin(text: P.Input, out: P.Output):
    while True:
        pass


class City(BaseModel):
    name: str = Field(max_length=20)
    is_capital: bool


@P.semantic_function(conversation_template=P.chat_template)
def as_json(
    text: P.Input,
    city: P.Output(P.SamplingConfig(temperature=0, max_gen_length=64), json_schema=City),
):
    """Say this as JSON with a name and is_capital: {{text}} {{city}}"""


@P.semantic_function()
def judge(
    text: P.Input, verdict: P.Output(choices=["good", "bad"]), smile: P.Output(regex="[😀-🙏]")
):
    """{{text}} That is {{verdict}}. {{smile}}"""


def prompt_tokens(vm: P.VirtualMachine, output: str) -> tuple[int, int]:
    """Return the (cached, computed) prompt tokens of the last call with `output`."""
    calls = [call for call in vm.session_info().calls if call.output == output]
    return calls[-1].cached_tokens, calls[-1].computed_tokens


def test_the_model_answers(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        assert "Paris" in capital("France").get()


def test_outputs_with_a_required_format(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        city = as_json("Paris is the capital of France.")
        assert isinstance(city.get(), City)
        assert city.finish_reason == "stop"
        verdict, smile = judge(city)
        assert verdict.get() in ("good", "bad")
        assert len(smile.get()) == 1
        assert "".join(as_json("Rome is in Italy.").stream()).startswith("{")


async def test_chat_completions_in_a_format(embedded_cluster: Cluster) -> None:
    body: dict[str, Any] = {
        "model": "embedded",
        "messages": [{"role": "user", "content": "Paris, as JSON:"}],
        "max_tokens": 64,
        "temperature": 0,
    }
    closed = City.model_json_schema() | {"additionalProperties": False}
    schema = {"name": "city", "schema": closed, "strict": True}
    async with aiohttp.ClientSession(embedded_cluster.core_url) as http:

        async def ask(**fields: Any) -> tuple[int, Any]:
            async with http.post("/v1/chat/completions", json=body | fields) as response:
                return response.status, await response.json()

        formatted = {"type": "json_schema", "json_schema": schema}
        status, answer = await ask(response_format=formatted)
        assert status == 200, answer
        City.model_validate_json(answer["choices"][0]["message"]["content"])
        assert answer["choices"][0]["finish_reason"] == "stop"
        _, answer = await ask(structured_outputs={"choice": ["Paris", "Rome"]})
        assert answer["choices"][0]["message"]["content"] in ("Paris", "Rome")
        wrong = {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}
        status, answer = await ask(response_format=wrong)
        assert (status, answer["error"]["param"]) == (400, "json_schema")
        assert "uniqueItems" in answer["error"]["message"]


async def test_log_probabilities_of_an_answer(embedded_cluster: Cluster) -> None:
    """Greedy tokens are the most likely tokens, for a prompt as text and as tokens."""
    text = "The capital of France is the city of"
    asked = {"model": "embedded", "max_tokens": 6, "temperature": 0, "logprobs": 3}
    async with aiohttp.ClientSession(embedded_cluster.core_url) as http:

        async def ask(path: str, **fields: Any) -> Any:
            async with http.post(path, json=fields) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        tokens = (await ask("/tokenize", model="embedded", prompt=text))["tokens"]
        first, again = [
            await ask("/v1/completions", **asked, prompt=prompt) for prompt in (text, tokens)
        ]
        (choice,), (other,) = first["choices"], again["choices"]
        found, same = choice["logprobs"], other["logprobs"]
        assert same["tokens"] == found["tokens"]
        assert same["token_logprobs"] == pytest.approx(found["token_logprobs"], abs=1e-3)
        assert "".join(found["tokens"]) == choice["text"]
        for i, likely in enumerate(found["top_logprobs"]):
            assert max(likely, key=likely.__getitem__) == found["tokens"][i]
            assert likely[found["tokens"][i]] == found["token_logprobs"][i]
            assert 0 < sum(math.exp(value) for value in likely.values()) < 1 + 1e-4
            assert choice["text"][found["text_offset"][i] :].startswith(found["tokens"][i])
        many = await ask(
            "/v1/completions", **asked | {"temperature": 1.5, "seed": 3}, prompt=tokens, best_of=8
        )
        (best,) = many["choices"]
        alone = await ask(
            "/v1/completions", **asked | {"temperature": 1.5, "seed": 3}, prompt=tokens, n=8
        )
        means = {
            choice["text"]: statistics.fmean(choice["logprobs"]["token_logprobs"])
            for choice in alone["choices"]
        }
        assert best["text"] == max(means, key=means.__getitem__)


def test_outputs_of_one_call_and_of_calls_that_feed_each_other(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        punchline, why = joke("parrots")
        summary = about(why)
        loud = shout(summary)
        assert loud.get() == summary.get().strip().upper() + "!"
        assert why.get() != punchline.get()


def test_parallel_calls_have_the_same_outputs_as_single_calls(vm: P.VirtualMachine) -> None:
    topics = ["rain", "bread", "the sea", "Monday"]
    with vm.running_scope():
        alone = [about(topic).get() for topic in topics]
    with vm.running_scope():
        together = [about(topic) for topic in topics]
        assert [variable.get() for variable in together] == alone


def test_streamed_chunks_add_up_to_the_value(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        summary = about("Parrots are birds that can learn to speak.")
        pieces = list(summary.stream())
        assert len(pieces) > 3
        assert "".join(pieces) == summary.get()


@P.semantic_function()
def read(text: P.Input, question: P.Input, answer: P.Output(GREEDY)):
    """{{text}} Question: {{question}} Answer: {{answer}}"""


def test_a_shared_prefix_is_computed_once(vm: P.VirtualMachine) -> None:
    document = f"Report {new_token()}. "  # not cached by an earlier run
    document += " ".join(f"Fact {i} is that number {i} follows {i - 1}." for i in range(1, 80))
    with vm.running_scope():
        text = P.variable("text", document)
        read(text, "what is fact 3?").get()
        assert prompt_tokens(vm, "answer")[1] > 1000
        read(text, "what is fact 7?").get()
        cached, computed = prompt_tokens(vm, "answer")
    assert cached > 1000
    assert computed < 20


@P.semantic_function()
def say(text: P.Input, reply: P.Output(GREEDY)):
    """{{text}} {{reply}}"""


def test_a_stateful_call_continues_the_whole_context(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        say.invoke_statefully(context_successor=say, text="My name is Robin.").get()
        say.invoke_statefully(context_successor=say, text="What is my name?").get()
        cached, computed = prompt_tokens(vm, "reply")
    assert cached > computed > 0


def test_failures_reach_only_their_own_reader(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        good = about("All is well.")
        failed = divide("x")
        dependent = about(failed)
        with pytest.raises(NativeFunctionFailed, match="division"):
            failed.get()
        with pytest.raises(NativeFunctionFailed, match="division"):
            dependent.get(timeout=10)
        with pytest.raises(NativeFunctionFailed):
            spin("x").get(timeout=10)
        with pytest.raises(PromptTooLong):
            about("word " * 20_000).get(timeout=30)
        assert good.get()


def test_a_cancelled_call_stops_and_the_next_one_runs(vm: P.VirtualMachine) -> None:
    long = P.SamplingConfig(temperature=0, max_gen_length=2000, ignore_tokenizer_eos=True)

    @P.semantic_function()
    def ramble(out: P.Output(long)):
        """Go on and on: {{out}}"""

    with vm.running_scope():
        rambling = ramble()
        pieces = rambling.stream()
        next(pieces)
        rambling.cancel()
        with pytest.raises(Cancelled):
            list(pieces)
        assert about("Something else.").get()


def test_bench_measures_the_model_by_variables_and_by_plain_calls(
    embedded_cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    sizes = "map_reduce:documents=1,document_tokens=96,chunk=32,output=4"
    result = parrot("bench", embedded_cluster.core_url, "--workload", sizes, "--output", str(path))
    assert result.returncode == 0, result.stderr
    variables, plain = json.loads(path.read_text())["results"]
    assert variables["total_output_tokens"] == plain["total_output_tokens"] == 16
    planned = 4 * 60 + 96 + 3 * 4
    assert plain["total_input_tokens"] == pytest.approx(planned, rel=0.1)
