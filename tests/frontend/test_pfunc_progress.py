"""Gathered results of maps: in order, with a progress bar, and with the errors of failed calls."""

import io
import sys

import pytest

from parrot import P
from parrot.frontend.pfunc.display.progress import reporting
from parrot.protocol.errors import EngineFailed, TimedOut, ValidationFailed
from tests.support.fake_serve import FakeServe


@P.semantic_function()
def ask(question: P.Input, answer: P.Output):
    """{{question}} A {{answer}}"""


@P.semantic_function()
def both(question: P.Input, first: P.Output, second: P.Output):
    """{{question}} 1 {{first}} 2 {{second}}"""


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch, *, has_tqdm: bool) -> Screen:
    """Make stderr look like a terminal."""
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_results_come_in_order_and_errors_where_they_belong(
    vm: P.VirtualMachine, serve: FakeServe
) -> None:
    with vm.running_scope():
        items = ["a", "fail", "b", "fail"]
        with pytest.raises(EngineFailed):
            P.gather(vm.map(ask, items))
        values = P.gather(vm.map(ask, items), return_exceptions=True)
        assert [values[0], values[2]] == ["<a A >", "<b A >"]
        assert [type(values[1]), type(values[3])] == [EngineFailed] * 2
        assert serve.num_requests["graph"] == 2
        quick = ask("c")
        quick.get()
        slow = P.gather([ask("hang"), quick], timeout=0.2, return_exceptions=True)
        assert (type(slow[0]), slow[1]) == (TimedOut, "<c A >")


def test_an_invalid_object_is_an_error_of_its_own_result(
    vm: P.VirtualMachine,
) -> None:
    from pydantic import BaseModel

    class Number(BaseModel):
        value: int

    @P.semantic_function()
    def read(text: P.Input, number: P.Output(json_schema=Number)):
        """{{text}} {{number}}"""

    with vm.running_scope():
        values = P.gather(vm.map(read, ["one"]), return_exceptions=True)
        assert isinstance(values[0], ValidationFailed)


async def test_calls_with_several_outputs_give_tuples(vm: P.VirtualMachine) -> None:
    seen: list[tuple[int, int]] = []
    with vm.running_scope():
        calls = await vm.amap(both, ["a", "fail"])
        values = await P.agather(
            calls, return_exceptions=True, progress=lambda *counts: seen.append(counts)
        )
        assert values[0][0] == "<a 1 >"
        assert values[0][1].startswith("<a 1 ")
        assert isinstance(values[1], EngineFailed)
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_bar_is_a_line_without_tqdm(
    vm: P.VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = watched(monkeypatch, has_tqdm=False)
    with vm.running_scope():
        P.gather(vm.map(ask, ["a", "b", "c"]), progress="Answers")
        first, *_, last = screen.getvalue().split("\r")[1:]
        assert first.startswith(f"Answers: [{'.' * 30}] 0/3 in 0.0 s")
        assert last.startswith(f"Answers: [{'#' * 30}] 3/3 in ")
        assert last.endswith(" s\n")
        assert len(list(P.as_completed(vm.map(ask, ["d"]), progress=True))) == 1
        assert "1/1" in screen.getvalue()


def test_a_bar_of_tqdm(vm: P.VirtualMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    screen = watched(monkeypatch, has_tqdm=True)
    with vm.running_scope():
        P.gather(vm.map(ask, ["a", "b", "c"]), progress="Answers")
    assert "Answers: 100%|" in screen.getvalue()
    assert "3/3" in screen.getvalue()


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (True, "Answers", None, False):
        with reporting(progress, 3) as report:
            assert report is None
    assert capsys.readouterr().err == ""


def test_a_bar_ends_with_the_loop_that_it_shows(
    vm: P.VirtualMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = watched(monkeypatch, has_tqdm=False)
    with vm.running_scope(), pytest.raises(EngineFailed):
        P.gather(vm.map(ask, ["fail", "hang"]), progress=True)
    assert screen.getvalue().endswith("s\n")
