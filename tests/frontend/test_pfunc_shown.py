"""The displays of a program: in notebooks, and the cost report at its end."""

import ast
import asyncio
import contextvars
from types import FunctionType
from typing import Any

import pytest

from parrot import P
from parrot.frontend.pfunc.display.shown import ShownSession, cost_report, variable_html
from parrot.protocol.public import CompletionInfo, FunctionCosts, GraphEdge

EVIL = "<script>alert(1)</script>&\"'"


def call(number: int, func: str, **fields: object) -> CompletionInfo:
    names = {"func_name": func, "output": f"out{number}", "output_var_id": f"v{number}"}
    return CompletionInfo.model_validate({"request_id": number, "state": "done", **names, **fields})


def session(*calls: CompletionInfo) -> ShownSession:
    edges = [GraphEdge(source="v1", target="v2", variable=EVIL)]
    return ShownSession(
        session_id=7,
        state="active",
        age_s=1,
        expires_in_s=1,
        vars=[],
        calls=list(calls),
        edges=edges,
    )


def test_a_session_in_a_notebook() -> None:
    html = session(
        call(1, EVIL, started_s=1.0, finished_s=3.5, cached_tokens=2, computed_tokens=3),
        call(2, "second", engine=EVIL),
    )._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 3
    assert "<td>5</td><td>2</td>" in html
    assert "<td>2.50</td>" in html
    assert "and 100 more calls" in session(*(call(n, "f") for n in range(300)))._repr_html_()


def test_a_variable_in_a_notebook(vm: P.VirtualMachine) -> None:
    assert variable_html(EVIL, EVIL).count("&lt;script&gt;") == 2
    assert "<script" not in variable_html(EVIL, EVIL)
    assert "and 1000 more characters" in variable_html("x", "y" * 5000)
    with vm.running_scope():
        unread = P.variable("unread")
        assert unread._repr_html_() == "<b>unread</b>: <i>not read yet</i>"
        assert "a &lt; b" in P.variable("known", "a < b")._repr_html_()
        assert "Session" in vm.session_info()._repr_html_()  # type: ignore[attr-defined]


def test_costs_are_by_function() -> None:
    text = cost_report(
        session(
            call(1, "map", cached_tokens=6, computed_tokens=2, output_tokens=3),
            call(2, "map", started_s=1.0, finished_s=2.0, state="failed"),
            call(3, "reduce", computed_tokens=8, output_tokens=1),
        ),
        2.0,
    )
    rows = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[1] == ["map", "2", "1", "8", "75%", "3", "1.00"]
    assert cells[2] == ["reduce", "1", "0", "8", "0%", "1", "0.00"]
    assert cells[3] == ["all, in 2.00 s", "3", "1", "16", "38%", "4", "1.00"]
    assert len({len(line) for line in text.splitlines()}) == 1


def test_costs_in_money_are_by_the_prices_of_the_service() -> None:
    info = session(call(1, "map", output_tokens=3), call(2, "reduce"), call(3, "native"))
    tokens = {"prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "calls": 1}
    for name, cost in (("map", 2.5), ("reduce", 0.000125)):
        info.costs.append(FunctionCosts(func_name=name, cost=cost, **tokens))
    last = [line.split()[-1] for line in cost_report(info, 2.0).splitlines()]
    assert last == ["cost", "2.50", "0.000125", "0.000000", "2.50"]


@P.semantic_function()
def tell(topic: P.Input, joke: P.Output) -> None:
    """Tell a joke about {{topic}}: {{joke}}"""


def test_a_program_reports_its_cost_at_its_end(
    vm: P.VirtualMachine, capsys: pytest.CaptureFixture[str]
) -> None:
    vm.run(lambda: tell("parrots").get(), report=True)
    assert "tell" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        vm.run(lambda: tell("parrots") and 1 / 0, report=True)
    assert "all, in " in capsys.readouterr().err
    vm.run(lambda: tell("parrots").get())
    assert capsys.readouterr().err == ""


def test_a_notebook_awaits_in_its_cells(vm: P.VirtualMachine) -> None:
    """Each cell runs in its own context, on an event loop that always runs."""
    cells = (
        "vm.set_global_env()",
        "joke = await tell.ainvoke('parrots')",
        "text = await joke.aget()",
        "texts = await P.agather(await vm.amap(tell, ['a', 'b']), progress=True)",
        "async with vm.batch():\n    last = await tell.ainvoke('c')",
        "for piece in last.stream():\n    pass",
        "vm.unset_global_env()",
    )
    scope: dict[str, Any] = {"vm": vm, "tell": tell, "P": P}
    with asyncio.Runner() as runner:
        for cell in cells:
            code = compile(cell, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            made = FunctionType(code, scope)()
            if asyncio.iscoroutine(made):
                runner.run(made, context=contextvars.Context())
    assert scope["text"] == "<Tell a joke about parrots: >"
    assert len(scope["texts"]) == 2
    assert "parrots" in scope["joke"]._repr_html_()


async def test_the_error_in_a_notebook_names_the_alternative(vm: P.VirtualMachine) -> None:
    async def program() -> None: ...

    with pytest.raises(RuntimeError, match="await program"):
        vm.run(program)
    with pytest.raises(RuntimeError, match="await program"):
        vm.run(program())
    assert not vm.session_registered
