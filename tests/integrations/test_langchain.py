"""LangChain's chains against the real ServeCore with a scripted engine."""

import asyncio
import copy
import operator
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableParallel
from langgraph.checkpoint.memory import InMemorySaver
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot import P
from parrot.integrations.langchain import (
    ChatParrot,
    LazyAIMessage,
    LazyHumanMessage,
    LazyPrompt,
    fetch,
)
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.docs.pages import blocks_of
from tests.support.app_server import running_in_thread
from tests.support.fake_engine import FakeEngine, Script, fake_engine, register

DOCS = [{"text": f"text {i}"} for i in range(5)]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"


class CountingApp:
    """Records the paths of all requests in order."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = re.sub("/(semantic_var|session)/.*", r"/\1/ID", scope["path"])
            self.asked.append(f"{scope['method']} {path}")
        await self._app(scope, receive, send)


def answer(prompt: str) -> str:
    """Return the scripted answer to a chat prompt: its last message in capitals."""
    return prompt.split("user\n")[-1].split("<|im_end|>")[0].upper()


@pytest.fixture
def engine() -> FakeEngine:
    return fake_engine(script=Script(text=answer))


@pytest.fixture
def app(engine: FakeEngine) -> Iterator[CountingApp]:
    config, clock = CoreConfig(), MonotonicClock()
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda _: engine))
    yield CountingApp(create_app(core))
    core.check_integrity()


@pytest.fixture
def url(app: CountingApp, engine: FakeEngine) -> Iterator[str]:
    with running_in_thread(app) as url:
        asyncio.run(register(url, engine))
        app.asked.clear()
        yield url


@pytest.fixture
def vm(url: str) -> P.VirtualMachine:
    return P.VirtualMachine(url)


@pytest.fixture
def model() -> ChatParrot:
    return ChatParrot(temperature=0)


def lazy_prompt(text: str) -> LazyPrompt:
    return LazyPrompt(template=ChatPromptTemplate.from_template(text))


@pytest.fixture
def chain(model: ChatParrot) -> Runnable[Any, Any]:
    summarize = ChatPromptTemplate.from_template("Sum up {text}") | model
    combine = lazy_prompt("Combine {summaries} now") | model
    return summarize.map() | (lambda messages: {"summaries": messages}) | combine


COMBINED = "COMBINE " + "\n\n".join(f"SUM UP TEXT {i}" for i in range(5)) + " NOW"


# Chains


def test_a_map_reduce_is_one_graph(
    vm: P.VirtualMachine, app: CountingApp, engine: FakeEngine, chain: Runnable[Any, Any]
) -> None:
    with vm.running_scope(), vm.batch():
        message = chain.invoke(DOCS)
        assert app.asked == ["POST /v1/session"]
        assert isinstance(message, AIMessage)
        assert message.content == COMBINED
        assert app.asked[1:] == ["POST /v1/semantic_graph", "GET /v1/semantic_var/ID"]
        info = vm.session_info()
    assert len(engine.prompts) == len(info.calls) == 6
    assert len(info.edges) == 5
    assert all(f"SUM UP TEXT {i}" in engine.prompts[-1] for i in range(5))
    assert message.content == COMBINED  # The session has ended.


def test_without_a_batch_no_step_waits_for_a_text(
    vm: P.VirtualMachine, app: CountingApp, engine: FakeEngine, chain: Runnable[Any, Any]
) -> None:
    with vm.running_scope():
        message = chain.invoke(DOCS)
        assert app.asked == ["POST /v1/session"] + ["POST /v1/semantic_call"] * 6
        assert engine.prompts == []
        assert message.content == COMBINED


async def test_async_chains_are_one_graph(
    vm: P.VirtualMachine, app: CountingApp, chain: Runnable[Any, Any]
) -> None:
    with vm.running_scope():
        async with vm.batch():
            message = await chain.ainvoke(DOCS)
            text = await (chain | fetch | StrOutputParser()).ainvoke(DOCS)
            assert (await message.aget()).content == text == COMBINED
    assert app.asked.count("POST /v1/semantic_graph") == 1
    assert "POST /v1/semantic_call" not in app.asked


def test_parallel_steps_and_semantic_functions(
    vm: P.VirtualMachine, app: CountingApp, model: ChatParrot
) -> None:
    ask = ChatPromptTemplate.from_template("{q}") | model
    both = RunnableParallel(a=ask, b=ask) | lazy_prompt("{a} or {b} or {a}?") | model

    @P.semantic_function(conversation_template=P.chat_template)
    def rate(text: P.Input, rating: P.Output):
        """rate {{text}} {{rating}}"""

    with vm.running_scope(), vm.batch():
        rating = rate(both.invoke({"q": "x"}).variable)
        end = (lazy_prompt("{rating}!") | model).invoke(rating)
        assert app.asked == ["POST /v1/session"]
        assert end.content == "RATE X OR X OR X?!"


def test_steps_that_read_messages_give_the_same_result(
    vm: P.VirtualMachine, app: CountingApp, model: ChatParrot
) -> None:
    first = ChatPromptTemplate.from_template("Sum up {text}") | model | StrOutputParser()
    second = ChatPromptTemplate.from_template("Again: {text}") | model
    with vm.running_scope(), vm.batch():
        assert (first | second).invoke(DOCS[0]).content == "AGAIN: SUM UP TEXT 0"
        assert app.asked.count("POST /v1/semantic_graph") == 2


def test_two_event_loops_and_threads_at_once(
    vm: P.VirtualMachine, chain: Runnable[Any, Any]
) -> None:
    async def several() -> list[str]:
        messages = await asyncio.gather(*[chain.ainvoke(DOCS) for _ in range(3)])
        return [(await message.aget()).content for message in messages]

    def in_loop() -> list[str]:
        with vm.running_scope(), vm.batch():
            return asyncio.run(several())

    def in_thread() -> list[str]:
        with vm.running_scope(), vm.batch():
            return [chain.invoke(DOCS).content for _ in range(3)]

    with vm.running_scope(), ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(run) for run in (in_loop, in_thread, in_loop, in_thread)]
        assert [run.result(timeout=60) for run in runs] == [[COMBINED] * 3] * 4


def test_a_message_is_read_by_many_threads(vm: P.VirtualMachine, chain: Runnable[Any, Any]) -> None:
    with vm.running_scope(), vm.batch(), ThreadPoolExecutor(8) as pool:
        message = chain.invoke(DOCS)
        texts = list(pool.map(lambda _: message.content, range(16), timeout=60))
    assert texts == [COMBINED] * 16


@pytest.fixture
def page(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run the page's programs. Returns the names that they define, and their `printed` output."""
    names: dict[str, Any] = {}
    programs = [b.code for b in blocks_of(PAGE) if b.language == "python" and b.is_run]
    for code in programs:
        if "langchain" in code or "langgraph" in code:
            exec(compile(code.replace("http://localhost:9000", url), "page", "exec"), names)
    return names | {"printed": capsys.readouterr().out}


TEXTS = ["The first text.", "The second.", "The third."]
PAGE_END = "\n\n".join(["COMBINE:", *(f"SUMMARIZE: {text.upper()}" for text in TEXTS)])


def test_each_program_of_the_page_is_one_graph(page: dict[str, Any], app: CountingApp) -> None:
    assert page["printed"] == f"{PAGE_END}\n" * 2
    one_graph = ["POST /v1/session", "POST /v1/semantic_graph", "GET /v1/semantic_var/ID"]
    assert app.asked == [*one_graph, "DELETE /v1/session/ID"] * 2


async def test_a_langgraph_fan_out_is_one_graph_in_async_code(
    page: dict[str, Any], app: CountingApp
) -> None:
    app.asked.clear()
    with page["vm"].running_scope():
        async with page["vm"].batch():
            state = await page["graph"].compile().ainvoke({"documents": page["documents"]})
            assert app.asked == ["POST /v1/session"]
            assert (await state["end"].aget()).content == PAGE_END
    assert app.asked.count("POST /v1/semantic_graph") == 1


def test_a_langgraph_with_checkpoints_keeps_plain_messages(page: dict[str, Any]) -> None:
    graph, summarize = page["StateGraph"](page["State"]), page["summarize"]
    graph.add_node("map", lambda state: {"end": fetch.invoke(summarize.invoke("x"))})
    graph.add_edge(page["START"], "map")
    app = graph.compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    with page["vm"].running_scope():
        app.invoke({"documents": []}, thread)
    assert app.get_state(thread).values["end"].content == "SUMMARIZE: X"


def test_a_langgraph_shows_tokens(page: dict[str, Any]) -> None:
    with page["vm"].running_scope():
        chunks = (
            page["graph"].compile().stream({"documents": page["documents"]}, stream_mode="messages")
        )
        pieces = [chunk.content for chunk, about in chunks if about["langgraph_node"] == "join"]
    assert len(pieces) > 2
    assert "".join(pieces) == PAGE_END


# Calls


def test_an_error_is_raised_when_the_message_is_read(
    vm: P.VirtualMachine, engine: FakeEngine, chain: Runnable[Any, Any]
) -> None:
    engine.script = Script(error=P.errors.InvalidRequest("the model is sad"))
    with vm.running_scope(), vm.batch():
        message = chain.invoke(DOCS)
        for _ in range(2):
            with pytest.raises(P.errors.ParrotError, match="the model is sad"):
                _ = message.content
        with pytest.raises(P.errors.ParrotError, match="the model is sad"):
            str(message)
        with pytest.raises(P.errors.ParrotError, match="the model is sad"):
            fetch.invoke([message])


async def test_an_error_is_raised_in_async_code(
    vm: P.VirtualMachine, engine: FakeEngine, model: ChatParrot
) -> None:
    engine.script = Script(error=P.errors.InvalidRequest("the model is sad"))
    with vm.running_scope():
        message = await model.ainvoke("x")
        with pytest.raises(P.errors.ParrotError, match="the model is sad"):
            await message.aget()


def test_a_fallback_inside_which_the_message_is_fetched(
    vm: P.VirtualMachine, engine: FakeEngine, model: ChatParrot
) -> None:
    engine.scripts = [Script(error=P.errors.InvalidRequest("the model is sad"))]
    again = (model | fetch).with_fallbacks([ChatParrot() | fetch])
    with vm.running_scope(), vm.batch():
        assert again.invoke("x").content == "X"


def test_a_read_with_a_timeout(vm: P.VirtualMachine, engine: FakeEngine, model: ChatParrot) -> None:
    engine.script = Script(hang_after=0)
    with vm.running_scope(), vm.batch():
        message = model.invoke("x")
        with pytest.raises(P.errors.TimedOut):
            message.variable.get(timeout=0.05)


def test_a_session_that_ended_before_the_read(vm: P.VirtualMachine, model: ChatParrot) -> None:
    with vm.running_scope():
        message = model.invoke("x")
    with pytest.raises(P.errors.SessionGone):
        _ = message.content


def test_streams(vm: P.VirtualMachine, model: ChatParrot) -> None:
    with vm.running_scope(), vm.batch():
        first = model.invoke("some text")
        chunks = list((lazy_prompt("of {it}") | model).stream(first))
    assert len(chunks) > 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == "OF SOME TEXT"
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] == "stop"


async def test_async_streams(vm: P.VirtualMachine, model: ChatParrot) -> None:
    with vm.running_scope():
        pieces = [chunk.content async for chunk in model.astream("some text")]
    assert len(pieces) > 2
    assert "".join(pieces) == "SOME TEXT"


async def test_callbacks_get_whole_texts(vm: P.VirtualMachine, model: ChatParrot) -> None:
    class Observer(BaseCallbackHandler):
        seen: list[str] = []  # noqa: RUF012

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.seen.append(response.generations[0][0].text)

    observer = Observer()
    with vm.running_scope(), vm.batch():
        message = model.invoke("one", {"callbacks": [observer]})
        assert type(message) is AIMessage
        chain = ChatPromptTemplate.from_template("{x}") | model
        await chain.ainvoke("two", {"callbacks": [observer]})
        assert (await model.agenerate([[HumanMessage("three")]])).generations[0][0].text == "THREE"
    assert observer.seen == ["ONE", "TWO"]


def test_the_prompt_is_the_models_chat(
    vm: P.VirtualMachine, engine: FakeEngine, model: ChatParrot
) -> None:
    prompt = LazyPrompt(
        template=ChatPromptTemplate.from_messages(
            [("system", "Be {how}."), MessagesPlaceholder("more"), ("human", "Take {{{{x}}}}: {x}")]
        )
    )
    with vm.running_scope():
        given = {"how": "brief", "more": [HumanMessage("Hi {{x}}")], "x": "{{answer}} {y}"}
        (prompt | model).invoke(given).text  # noqa: B018
        [messages] = [prompt.invoke(given).to_messages()]
    assert messages[0] == SystemMessage("Be brief.")
    assert messages[2].text == "Take {{x}}: {{answer}} {y}"
    sent = engine.prompts[0]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in sent
    assert "<|im_start|>user\nHi {{x}}\n\nTake {{x}}: {{answer}} {y}<|im_end|>" in sent


def test_options_are_sampling_fields(vm: P.VirtualMachine, engine: FakeEngine) -> None:
    model = ChatParrot(model="tiny", max_tokens=7, seed=1).bind(top_k=3)
    with vm.running_scope():
        model.invoke("x", stop=["!"], temperature=0.5).text  # noqa: B018
    sampling = engine.requests[0].sampling_config
    assert (sampling.max_gen_length, sampling.seed, sampling.top_k) == (7, 1, 3)
    assert (sampling.temperature, sampling.stop_str) == (0.5, ("!",))


def test_unsupported_options_are_rejected(vm: P.VirtualMachine, model: ChatParrot) -> None:
    with pytest.raises(P.errors.InvalidRequest, match="running_scope"):
        model.invoke("x")
    with vm.running_scope():
        with pytest.raises(P.errors.InvalidRequest, match="ChatOpenAI"):
            model.invoke([HumanMessage("x"), AIMessage("y"), HumanMessage("z")])
        with pytest.raises(P.errors.InvalidRequest, match="no human message"):
            model.invoke([SystemMessage("x")])
        with pytest.raises(P.errors.InvalidRequest, match="only text"):
            model.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])])
        with pytest.raises(TypeError, match="no option `wings`"):
            model.invoke("x", wings=2)
        with pytest.raises(ValueError, match="temperature"):
            model.invoke("x", temperature=-1)
        with pytest.raises(NotImplementedError):
            model.bind_tools([])
        late = ChatPromptTemplate.from_messages([("system", "{x}"), ("human", "Hi")])
        with pytest.raises(P.errors.InvalidRequest, match="system message"):
            LazyPrompt(template=late).invoke({"x": model.invoke("y")})


# Prompts and messages


def test_prompts_that_cannot_keep_values_open_are_rejected() -> None:
    for template in (
        ChatPromptTemplate.from_template("{{ x }}", template_format="jinja2"),
        ChatPromptTemplate.from_template("{{x}}", template_format="mustache"),
        ChatPromptTemplate.from_messages([("ai", "{x}")]),
        ChatPromptTemplate.from_messages([("human", [{"type": "text", "text": "{x}"}])]),
    ):
        with pytest.raises(ValueError, match="LazyPrompt takes text"):
            LazyPrompt(template=template)


def test_values_are_formatted_as_python_does() -> None:
    prompt = lazy_prompt("{a:.1f} {b!r} {c} {d} {e}")
    given = {"a": 1.23, "b": "b", "c": None, "d": [1, "2"], "e": [AIMessage("x"), "y", 3]}
    assert prompt.invoke(given).to_string() == "Human: 1.2 'b' None [1, '2'] x\n\ny\n\n3"
    with pytest.raises(KeyError, match="b"):
        prompt.invoke({"a": 1})
    with pytest.raises(TypeError, match="a dict"):
        prompt.invoke("x")
    open_value = LazyAIMessage.of([P.variable("v")])
    with pytest.raises(TypeError, match="format"):
        lazy_prompt("{a:>9}").invoke(open_value)


@pytest.mark.parametrize(
    "look",
    [
        lambda message: message.content,
        lambda message: str(message.text),
        lambda message: message.content_blocks[0]["text"],
        lambda message: message.model_dump()["content"],
        lambda message: dumpd(message)["kwargs"]["content"],
        lambda message: copy.copy(message).content,
        lambda message: copy.deepcopy(message).content,
        lambda message: message.model_copy().content,
        lambda message: pickle.loads(pickle.dumps(message)).content,
        lambda message: fetch.invoke([message])[0].content,
        operator.attrgetter("text"),
    ],
)
def test_each_way_to_read_a_message_gives_the_text(look: Any) -> None:
    for kind in (LazyAIMessage, LazyHumanMessage):
        message = kind.of([P.variable("v", content="text")])
        message.id, message.name = "i", "n"
        assert not message._is_fetched
        assert look(message) == "text"
        assert (message.id, message.name) == ("i", "n")


def test_operations_that_do_not_read_the_message() -> None:
    variable = P.variable("v")
    message = LazyAIMessage.of([variable])
    assert "SemanticVariable(name='v'" in repr(message)
    assert (message.type, message.id, message.tool_calls) == ("ai", None, [])
    assert message.variable is variable
    with pytest.raises(P.errors.InvalidRequest, match="no value"):
        _ = message.content


def test_messages_of_content_and_plain_ones() -> None:
    message = LazyAIMessage(content="x")
    assert message.content == "x"
    assert message.variable is None
    assert dumpd(message)["id"][-1] == "AIMessage"
    fetched = fetch.invoke(LazyAIMessage.of([P.variable("v", content="text")]))
    assert type(fetched) is AIMessage
    assert message != fetched
    assert fetch.invoke("anything") == "anything"
    message.content = "y"
    assert message.text == "y"
