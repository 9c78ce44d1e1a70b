import asyncio
from collections.abc import Iterator

import pytest

from parrot.utils.tasks import Backlog


@pytest.fixture
def done() -> list[str]:
    return []


def work(done: list[str], name: str, count: int, size: int = 1) -> Iterator[int]:
    for number in range(count):
        done.append(f"{name}{number}")
        yield size


def test_little_work_is_done_at_once(done: list[str]) -> None:
    backlog = Backlog(per_slice=4)
    backlog.add("a", work(done, "x", 3))
    backlog.add("a", work(done, "y", 1))
    assert done == ["x0", "x1", "x2", "y0"]
    assert "a" not in backlog


async def test_much_work_is_done_in_slices_and_owners_take_turns(done: list[str]) -> None:
    backlog = Backlog(per_slice=2)
    backlog.add("a", work(done, "x", 5))
    backlog.add("b", work(done, "y", 6, size=2))
    backlog.add("a", work(done, "z", 1))
    assert done == ["x0", "x1", "y0"]
    slices = []
    while "a" in backlog or "b" in backlog:
        num_done = len(done)
        await asyncio.sleep(0)
        slices.append(done[num_done:])
    assert slices[:4] == [["x2", "x3"], ["y1"], ["x4", "z0"], ["y2"]]
    assert len(done) == 12


async def test_follow_up_work_is_appended_and_dropped_work_is_skipped(
    done: list[str],
) -> None:
    backlog = Backlog(per_slice=2)

    def steps() -> Iterator[int]:
        backlog.add("a", work(done, "x", 2))
        yield 1
        done.append("steps")
        yield 1
        backlog.drop("a")
        yield 1
        raise AssertionError

    backlog.add("a", steps())
    assert done == ["steps"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == ["steps"]
    assert "a" not in backlog


async def test_an_error_is_raised_to_the_caller_and_other_work_is_done(done: list[str]) -> None:
    backlog = Backlog(per_slice=100)

    def steps() -> Iterator[int]:
        backlog.add("a", work(done, "x", 2))
        yield 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        backlog.add("a", steps())
    assert not done
    backlog.finish()
    assert done == ["x0", "x1"]
