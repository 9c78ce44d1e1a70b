"""Stateful calls: the next call of a function continues the context of an earlier one."""

import asyncio

import pytest

from parrot import P
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from tests.support.fake_serve import FakeServe


@P.semantic_function()
def start(name: P.Input):
    """You are {{name}}."""


@P.semantic_function()
def chat(human: P.Input, bot: P.Output):
    """| H {{human}} B {{bot}}"""


@P.semantic_function(remove_pure_fill=False)
def chat_with_end(human: P.Input, bot: P.Output):
    """| H {{human}} B {{bot}} END"""


def test_a_chat_remembers(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        assert start.invoke_statefully(chat, "Polly") == ()
        first = chat.invoke_statefully(context_successor=chat, human="hi").get()
        second = chat.invoke_statefully(context_successor=chat, human="and?").get()
    assert first == "<You are Polly.| H hi B >"
    assert second == f"<You are Polly.| H hi B {first}| H and? B >"
    assert [call.successor_of is None for call in serve.calls] == [True, False, False]


def test_only_the_first_turn_of_a_chat_has_the_system_message(
    vm: P.VirtualMachine, serve: FakeServe
) -> None:
    brief = P.chat_template.with_system("Be brief.").transform(chat)
    with vm.running_scope():
        for human in ("hi", "and?"):
            brief.invoke_statefully(brief, human)
    assert [call.system for call in serve.calls] == ["Be brief.", None]
    assert all(call.chat for call in serve.calls)


async def test_async_chat(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        await start.ainvoke_statefully(chat, "Polly")
        bot = await chat.ainvoke_statefully(chat, "hi")
        assert await bot.aget() == "<You are Polly.| H hi B >"


def test_text_after_the_output_is_part_of_the_context(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        first = chat_with_end.invoke_statefully(chat, "hi")
        assert chat("and?").get() == f"<| H hi B {first.get()} END| H and? B >"


def test_a_plain_call_consumes_the_context(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        start.invoke_statefully(chat, "Polly")
        assert chat("hi").get() == "<You are Polly.| H hi B >"
        assert chat("hi").get() == "<| H hi B >"


def test_contexts_belong_to_the_named_function(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        start.invoke_statefully(chat, "Polly")
        assert chat_with_end("hi").get() == "<| H hi B >"
        assert chat("hi").get() == "<You are Polly.| H hi B >"


def test_contexts_end_with_the_session(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        start.invoke_statefully(chat, "Polly")
    with vm.running_scope():
        assert chat("hi").get() == "<| H hi B >"


def test_a_rejected_call_keeps_the_context(vm: P.VirtualMachine, serve: FakeServe) -> None:
    with vm.running_scope():
        start.invoke_statefully(chat, "Polly")
        serve.errors["call"] = [UnsupportedField("no such thing")]
        with pytest.raises(UnsupportedField):
            chat("hi")
        assert chat("hi").get() == "<You are Polly.| H hi B >"


async def test_only_one_of_two_calls_at_once_continues(vm: P.VirtualMachine) -> None:
    with vm.running_scope():
        await start.ainvoke_statefully(chat, "Polly")
        bots = await asyncio.gather(*[chat.ainvoke("hi") for _ in range(3)])
        answers = sorted([await bot.aget() for bot in bots])
    assert answers == ["<You are Polly.| H hi B >"] + ["<| H hi B >"] * 2


def test_misuse(vm: P.VirtualMachine) -> None:
    with pytest.raises(InvalidRequest, match="need a session"):
        start.invoke_statefully(chat, "Polly")
    with vm.running_scope(), pytest.raises(TypeError, match="context_successor"):
        start.invoke_statefully("chat", "Polly")
