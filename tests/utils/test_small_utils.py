import asyncio
import logging

import pytest

from parrot.utils.cprofile import cprofile
from parrot.utils.ids import IdCounter, new_token, tokens_equal
from parrot.utils.tasks import TaskSet


def test_ids_are_unique() -> None:
    counter = IdCounter(start=5)
    assert [counter.next() for _ in range(3)] == [5, 6, 7]
    assert len({new_token() for _ in range(1000)}) == 1000
    assert len(new_token()) >= 22  # 128 bits in base64


def test_secrets_are_compared_by_value() -> None:
    assert tokens_equal("abc", "abc")
    assert not tokens_equal("abc", "abd")
    assert not tokens_equal("", "abc")
    assert not tokens_equal("\udc80é", "abc")


async def test_a_task_set_logs_failures_and_forgets_finished_tasks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = TaskSet()

    async def fail() -> None:
        raise RuntimeError("lost?")

    tasks.spawn(fail(), name="doomed")
    tasks.spawn(asyncio.sleep(0))
    assert len(tasks) == 2
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await asyncio.sleep(0)
    assert len(tasks) == 0
    assert "background task doomed failed" in caplog.text
    assert "lost?" in caplog.text


async def test_closing_a_task_set_cancels_and_waits() -> None:
    tasks = TaskSet()
    cleaned_up = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned_up.set()

    task = tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.close()
    assert task.cancelled()
    assert cleaned_up.is_set()
    assert len(tasks) == 0


def test_profile_is_printed_also_when_the_block_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not a number"), cprofile("my block"):
        int("not a number")
    printed = capsys.readouterr().out
    assert "profile of my block" in printed
    assert "cumulative" in printed
