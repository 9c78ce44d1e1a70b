"""Programs in the style of the original ParrotServe (third version) run unchanged."""

import asyncio
import copy
import sys
import types
from collections.abc import Iterator

import pytest

from parrot import P
from parrot.frontend.pfunc.function import Constant, ParameterLoc, PyNativeCall, SemanticCall
from parrot.frontend.pfunc.transforms.conversation_template import vicuna_template
from parrot.frontend.pfunc.transforms.prompt_formatter import PyIndentRemover
from parrot.testing.multiproc_manager import MultiProcessManager
from parrot.utils import cprofile
from parrot.utils.cprofile import cprofile as cprofile_by_path
from tests.support.fake_serve import FakeServe


@P.semantic_function(conversation_template=P.vicuna_template, try_register=False)
def riddle(
    subject: P.Input,
    riddle: P.Output,
    solution: P.Output(P.SamplingConfig(temperature=0.5)),
):
    """Make a riddle about {{subject}}. {{riddle}}.
    Now solve it in a few words. {{solution}}.
    """


@pytest.fixture
def library() -> Iterator[str]:
    module = types.ModuleType("an_earlier_library")
    module.riddle = riddle
    module.number = 3
    sys.modules[module.__name__] = module
    yield module.__name__
    del sys.modules[module.__name__]


def test_import_function(vm: P.VirtualMachine, library: str) -> None:
    assert vm.import_function("riddle", library) is riddle
    assert vm.import_function(function_name="riddle", module_path=library) is riddle
    with pytest.raises(ImportError, match="nothing"):
        vm.import_function("nothing", library)
    with pytest.raises(ImportError):
        vm.import_function("riddle", "no.such.module")
    with pytest.raises(ValueError, match="number"):
        vm.import_function("number", library)


def test_define_function(vm: P.VirtualMachine) -> None:
    func = vm.define_function(
        func_name="test",
        func_body="Given {{input}}:  {{output}} bye",
        params=[
            P.Parameter(name="input", typ=P.ParamType.INPUT_LOC),
            P.Parameter("n", P.ParamType.INPUT_PYOBJ),
            P.Parameter(
                name="output",
                typ=P.ParamType.OUTPUT_LOC,
                sampling_config=P.SamplingConfig(max_gen_length=5),
            ),
        ],
        models=["tiny"],
    )
    assert func.name == "test"
    assert func.to_template_str() == "Given {{input}}:  {{output}}"
    assert func.metadata.models == ("tiny",)
    with vm.running_scope():
        assert func("x", n=3).get() == "<Given x:  >"
    params = [P.Parameter("y", P.ParamType.OUTPUT_LOC)]
    names = [vm.define_function(None, "x {{y}}", params).name for _ in range(2)]
    assert names == ["anonymous_0", "anonymous_1"]
    with pytest.raises(TypeError, match="modles"):
        vm.define_function("f", "x {{y}}", params, modles=["m"])


def test_a_blocking_program_with_vicuna(vm: P.VirtualMachine) -> None:
    def main() -> None:
        first, second = riddle(subject="the sea")
        assert first.get(P.PerformanceCriteria.LATENCY).endswith("the sea. ASSISTANT: >")
        assert ">.</s>USER" not in second.get(P.PerformanceCriteria.LATENCY)

    latency = vm.run(main, timeit=True)
    assert 0 < latency < 60


def test_an_async_program_that_also_blocks(vm: P.VirtualMachine) -> None:
    async def main() -> None:
        first, second = riddle("the sea")
        first.get(P.PerformanceCriteria.THROUGHPUT)
        await asyncio.gather(first.aget(), second.aget())

    vm.run(main, timeit=True)


def test_manual_transforms() -> None:
    @P.semantic_function(formatter=None)
    def foo(a: P.Output):
        """This
        has indents. {{a}}
        """

    assert "    " not in PyIndentRemover().transform(foo).to_template_str()
    assert "USER: This" in vicuna_template.transform(foo).to_template_str()
    assert isinstance(foo.body[0], Constant)
    assert isinstance(foo.body[1], ParameterLoc)
    assert foo.body[1].param.is_output


def test_calls_outside_a_machine() -> None:
    @P.native_function()
    def add(a: P.Input, b: P.Input, c: P.Output):
        ret = str(int(a) + int(b))
        c.set(ret)

    call: PyNativeCall = add("1", "2")
    assert call.to_request_payload()["func_name"] == "add"
    semantic: SemanticCall = riddle("the sea")
    assert semantic.to_request_payload()["func_name"] == "riddle"
    with pytest.raises(AttributeError, match="outside any session"):
        semantic.get()
    assert copy.copy(semantic).bindings == semantic.bindings


def test_a_native_function_in_a_program(vm: P.VirtualMachine, serve: FakeServe) -> None:
    @P.native_function(timeout=0.5)
    def shout(a: P.Input, b: P.Output):
        b.set(a.upper())

    async def main() -> None:
        first, _ = riddle("the sea")
        loud = shout(first)
        assert await loud.aget() == shout.source
        assert (await shout.ainvoke(loud)).is_registered

    vm.run(main)
    assert serve.calls[1].timeout == 0.5
    assert serve.calls[1].parameters[0].var_id is not None


def test_profiling_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    with cprofile("block"):
        sorted([3, 1])
    assert "cumulative" in capsys.readouterr().out
    assert cprofile_by_path is cprofile


def double(number: int) -> int:
    return 2 * number


def raises() -> None:
    raise ZeroDivisionError("mine")


def ends() -> None:
    raise SystemExit(3)


def in_a_machine(url: str, number: int) -> str:
    seen: list[str] = []
    P.VirtualMachine(url).run(lambda: seen.append(riddle(number)[0].get()))
    return seen[0]


class TestProcesses:
    def test_results_in_order(self) -> None:
        manager = MultiProcessManager()
        for number in range(3):
            manager.add_proc(double, (number,))
        manager.run_all()
        assert manager.data == {0: 0, 1: 2, 2: 4}
        manager.reset()
        assert manager.data == {}
        manager.run_all()
        assert manager.data == {}

    def test_failures_reach_the_caller(self) -> None:
        manager = MultiProcessManager()
        manager.add_proc(double, (1,))
        manager.add_proc(raises)
        with pytest.raises(RuntimeError, match="ZeroDivisionError: mine"):
            manager.run_all()
        assert manager.data == {0: 2}

    def test_machines_in_processes(self, url: str, serve: FakeServe) -> None:
        manager = MultiProcessManager()
        for number in range(2):
            manager.add_proc(in_a_machine, (url, number))
        manager.run_all()
        assert [manager.data[i].endswith(f"{i}. ASSISTANT: >") for i in range(2)] == [True, True]
        assert len(serve.ended) == 2
