import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

import pytest

from parrot.protocol.errors import InvalidRequest, NativeFunctionFailed
from parrot.serve.config import CoreConfig
from parrot.serve.graph.nodes import CallOptions, CompletionState, NativeCall, SemanticVariable
from parrot.serve.sessions import SessionRegistry
from parrot.serve.tasks import NativeRunner, check_call
from parrot.serve.tenants.table import TenantTable
from parrot.utils.clock import MonotonicClock
from parrot.utils.heaps import TimerQueue
from tests.support.requests import given, made, native

_ids = count()


def make_call(
    source: str, outputs: tuple[str, ...] = ("out",), timeout_s: float = 1.0, **inputs: str
) -> NativeCall:
    def variable(name: str) -> SemanticVariable:
        return SemanticVariable(f"{name}-{next(_ids)}", name, 0)

    arguments = {name: variable(name) for name in inputs}
    for name, text in inputs.items():
        arguments[name].set(text)
    results = tuple((name, variable(name)) for name in outputs)
    return NativeCall(
        id=next(_ids),
        request_id=0,
        session_id=0,
        options=CallOptions("f", tenant="tenant"),
        source=source,
        timeout_s=timeout_s,
        arguments=tuple(arguments.items()),
        results=results,
        state=CompletionState.QUEUED,
    )


NUM_WORKERS = 2


@pytest.fixture
async def runner() -> AsyncIterator[NativeRunner]:
    config = CoreConfig(native_memory_mb=32, native_workers=NUM_WORKERS)
    clock = MonotonicClock()
    sessions = SessionRegistry(config, TenantTable(config), clock, TimerQueue(clock))
    runner = NativeRunner(config, clock, None, sessions)
    yield runner
    await runner.close()


async def results(runner: NativeRunner, call: NativeCall) -> list[str]:
    runner.start(call)
    return [await variable.wait() for _, variable in call.results]


async def failure(runner: NativeRunner, call: NativeCall) -> NativeFunctionFailed:
    with pytest.raises(NativeFunctionFailed) as caught:
        await results(runner, call)
    assert call.state is CompletionState.FAILED
    return caught.value


async def test_inputs_are_text_and_outputs_are_set(runner: NativeRunner) -> None:
    source = """
def f(first: P.Input, out: P.Output, second, length: P.Output):
    import re
    out.set(first.upper() + re.sub("[0-9]", "#", second))
    length.set(str(len(out.get())))
"""
    call = make_call(source, ("out", "length"), first="a{{x}}", second="b1'\"\n\u00e9\U0001f99c")
    assert await results(runner, call) == ["A{{X}}b#'\"\n\u00e9\U0001f99c", "13"]
    assert call.state is CompletionState.DONE
    assert call.times.started is not None


@pytest.mark.parametrize(
    "decorator",
    ["@P.native_function()", "@P.native_function(timeout=3.0, output_criteria=None)", ""],
)
async def test_decorators_and_indentation_are_tolerated(
    runner: NativeRunner, decorator: str
) -> None:
    source = f"    {decorator}\n    def f(out):\n        out.set('x')\n"
    assert await results(runner, make_call(source)) == ["x"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(out):\n    1 / 0", "ZeroDivisionError"),
        ("def f(out):\n    raise ValueError('my reason')", "ValueError: my reason"),
        ("def f(out:", "SyntaxError"),
        ("def g(out):\n    pass", "NameError"),
        ("def f():\n    pass", "TypeError"),
        ("def f(out):\n    pass", "did not set its output `out`"),
        ("def f(out):\n    out.set(5)", "output `out` takes str, not int"),
        ("def f(out):\n    out.set('a')\n    out.set('b')", "already set"),
        ("def f(out):\n    out._text = 5", "did not set"),
        ("def f(out):\n    f(out)", "RecursionError"),
        ("def f(out):\n    out.set(open('/etc/passwd').read())", "rror"),
        ("def f(out):\n    import socket", "ModuleNotFoundError"),
        ("def f(out):\n    import os\n    os.system('true')", "AttributeError"),
        ("def f(out):\n    while True:\n        pass", "TimeoutError"),
        ("def f(out):\n    import time\n    time.sleep(60)", "TimeoutError"),
        ("def f(out):\n    x = 'a' * 1000\n    while True:\n        x = x + x", "MemoryError"),
        ("def f(out):\n    out.set('x' * 10**9)", "MemoryError"),
    ],
)
async def test_errors_are_reported(runner: NativeRunner, source: str, message: str) -> None:
    timeout_s = 0.2 if message == "TimeoutError" else 5.0
    error = await failure(runner, make_call(source, timeout_s=timeout_s))
    assert message in error.message
    assert "`f`" in error.message
    assert await results(runner, make_call("def f(out):\n    out.set('alive')")) == ["alive"]


async def test_prints_are_discarded(
    runner: NativeRunner, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "def f(out):\n    print('noise' * 100)\n    out.set('x')"
    assert await results(runner, make_call(source)) == ["x"]
    assert capfd.readouterr() == ("", "")


async def test_runs_share_nothing(runner: NativeRunner) -> None:
    await results(runner, make_call("secret = 'mine'\ndef f(out):\n    out.set(secret)"))
    for _ in range(4):
        error = await failure(runner, make_call("def f(out):\n    out.set(secret)"))
        assert "NameError" in error.message


async def seconds_per_turn(work: asyncio.Future[object]) -> list[float]:
    """Return the sorted CPU times of the loop's thread in each 5 ms until the work is done."""
    used = []
    while not work.done():
        began = time.thread_time()
        await asyncio.sleep(0.005)
        used.append(time.thread_time() - began)
    return sorted(used)


async def test_the_loop_stays_responsive_meanwhile(runner: NativeRunner) -> None:
    sources = [
        "def f(out):\n    while True:\n        pass",
        "def f(out):\n    x = [0]\n    while True:\n        x = x + x",
        "def f(out):\n    x = 9**9**7",
        "def f(out):\n    x = 'a' * 1000\n    while True:\n        x = x + x",
    ]
    calls = [make_call(source, timeout_s=0.4) for source in sources]
    work = asyncio.gather(*(results(runner, call) for call in calls), return_exceptions=True)
    used = await seconds_per_turn(work)
    assert all(isinstance(outcome, NativeFunctionFailed) for outcome in await work)
    assert len(used) > 10, "the event loop ran in the meantime"
    assert used[-1] < 0.05, used[-5:]


async def test_stopping_ends_a_run_and_leaves_its_outputs(runner: NativeRunner) -> None:
    call = make_call("def f(out):\n    while True:\n        pass", timeout_s=60)
    runner.start(call)
    await until(lambda: call.state is CompletionState.RUNNING)
    runner.stop(call)
    runner.stop(call)
    assert not call.results[0][1].is_settled
    others = [make_call("def f(out):\n    out.set('x')") for _ in range(3)]
    assert [await results(runner, other) for other in others] == [["x"]] * 3
    assert not call.results[0][1].is_settled


async def test_a_killed_worker_fails_its_call_and_is_replaced(runner: NativeRunner) -> None:
    call = make_call("def f(out):\n    while True:\n        pass", timeout_s=30)
    runner.start(call)
    await until(lambda: call.state is CompletionState.RUNNING)
    await asyncio.sleep(0.2)
    for pid in sandbox_pids():
        os.kill(pid, 9)
    with pytest.raises(NativeFunctionFailed, match="sandbox ended"):
        await call.results[0][1].wait()
    assert await results(runner, make_call("def f(out):\n    out.set('x')")) == ["x"]


async def test_queued_calls_are_counted(runner: NativeRunner) -> None:
    calls = [make_call("def f(out):\n    out.set('x')") for _ in range(8)]
    for call in calls:
        runner.start(call)
    await asyncio.sleep(0)  # the first calls use the session's share of the workers
    num_waiting = 8 - (NUM_WORKERS - 1)
    assert runner.num_waiting == num_waiting
    assert runner.waiting_by_tenant == {"tenant": num_waiting}
    runner.stop(calls.pop())  # this call is queued
    assert runner.num_waiting == runner.waiting_by_tenant["tenant"] == num_waiting - 1
    for call in calls:
        await call.results[0][1].wait()
    assert runner.num_waiting == 0
    assert runner.waiting_by_tenant == {}


async def test_the_pool_starts_only_when_it_is_needed(runner: NativeRunner) -> None:
    assert sandbox_pids() == []
    await results(runner, make_call("def f(out):\n    out.set('x')"))
    assert len(sandbox_pids()) >= 1
    await runner.close()
    assert sandbox_pids() == []


@pytest.mark.parametrize("name", ["a b", "1a", "class", "f(x); import os #", "a\nb"])
def test_invalid_python_names_are_rejected(name: str) -> None:
    for request in (
        native(name, made("o")),
        native("f", given(name, "1"), made("o")),
        native("f", made(name)),
    ):
        with pytest.raises(InvalidRequest, match="not a Python name") as caught:
            check_call(request, 60)
        assert caught.value.param == name
    check_call(native("größe", made("o")), 60)


def test_sampling_of_a_native_output_is_rejected() -> None:
    check_call(native("f", made("o") | {"sampling_config": {"temperature": None}}), 60)
    with pytest.raises(InvalidRequest, match="`o`") as caught:
        check_call(native("f", made("o") | {"sampling_config": {"temperature": 0.5}}), 60)
    assert caught.value.param == "sampling_config"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - a state, not an event
            await asyncio.sleep(0.01)


def sandbox_pids() -> list[int]:
    """Return the ids of live child processes that run the sandbox."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[1] == str(os.getpid()) and fields[0] != "Z" and b"monty" in command:
            pids.append(int(entry.name))
    return pids
