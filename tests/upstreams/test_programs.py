"""PFunc programs in front of a server with an OpenAI API: their chats reach it as messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parrot import P
from parrot.cluster import Cluster
from tests.support.app_server import running_in_thread
from tests.support.fake_openai import FakeOpenAI

SHORT = P.SamplingConfig(max_gen_length=9)


@P.semantic_function(conversation_template=P.chat_template.with_system("Be brief."))
def explain(question: P.Input, answer: P.Output(SHORT), reason: P.Output(SHORT)):
    """Answer this: {{question}}
    {{answer}}
    Why?
    {{reason}}"""


@P.semantic_function()
def complete(start: P.Input, rest: P.Output(SHORT)):
    """{{start}} is {{rest}}"""


@contextmanager
def in_front_of(fake: FakeOpenAI, **engine: Any) -> Iterator[None]:
    """Programs in the block use a ServeCore in front of `fake`."""
    with running_in_thread(fake.app()) as url:
        core = {"servers": [{"url": f"{url}/v1", "engine": engine}]}
        with Cluster(core, []) as cluster, P.VirtualMachine(cluster.core_url).running_scope():
            yield


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_chats_are_sent_as_messages_and_other_prompts_as_text() -> None:
    fake = FakeOpenAI(reply="It is.")
    with in_front_of(fake):
        answer, reason = explain("Is it blue?")
        assert (answer.get(), reason.get()) == ("It is.", "It is.")
        assert complete("The sky").get() == "It is."
    first, second, third = fake.bodies
    system = {"role": "system", "content": "Be brief."}
    question = [system, user("Answer this: Is it blue?")]
    assert first["messages"] == question
    assert second["messages"] == [
        *question,
        {"role": "assistant", "content": "It is."},
        user("Why?"),
    ]
    assert third["prompt"] == "The sky is "
    assert [url.partition("/v1")[2] for url in fake.urls] == [
        "/chat/completions",
        "/chat/completions",
        "/completions",
    ]


def test_a_model_without_a_chat_template_gets_text() -> None:
    fake = FakeOpenAI(reply="It is.")
    with in_front_of(fake, instance={"features": {"messages": False}}):
        answer, _ = explain("Is it blue?")
        assert answer.get() == "It is."
    assert fake.bodies[0]["prompt"] == "Be brief.\n\nAnswer this: Is it blue?"
