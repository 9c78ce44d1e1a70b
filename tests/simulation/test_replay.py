"""Records programs on a simulated cluster and replays the trace."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parrot.engine.config import SimConfig
from parrot.gateway.turn_request import TurnRequest
from parrot.gateway.turns import Turns
from parrot.observe.recorder import TraceFile
from parrot.protocol.errors import TimedOut
from parrot.protocol.public import (
    FirstVarsRequest,
    NativeCallRequest,
    SemanticCallRequest,
    VarGetRequest,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.trace import CHUNK_CHARS
from parrot.simulation import SimCluster, fixed, run_virtual
from parrot.simulation.replay import Replay
from parrot.simulation.report import percentile
from parrot.simulation.trace import Trace, load_trace
from parrot.utils.config import ConfigError

ENGINE = SimConfig.model_validate({"instance": {"num_kv_cache_blocks": 2048}})
SYSTEM = ("You are a careful assistant who answers in few words. " * 20)[: 4 * CHUNK_CHARS]


class Program:
    def __init__(self, cluster: SimCluster, scope: dict[str, Any], rtt_s: float) -> None:
        self.cluster = cluster
        self.core = cluster.core
        self.client = cluster.client(fixed(rtt_s))
        self.scope = scope

    @classmethod
    async def begin(cls, cluster: SimCluster, rtt_s: float) -> "Program":
        client = cluster.client(fixed(rtt_s))
        return cls(cluster, (await client.create_session()).model_dump(), rtt_s)

    async def call(self, text: str, length: int, value: str = "", **inputs: str) -> str:
        parameters: list[dict[str, Any]] = [
            {"name": name, "var_id": var_id} for name, var_id in inputs.items()
        ]
        if value:
            parameters.append({"name": "value", "value": value})
        names = [parameter["name"] for parameter in parameters]
        sampling = {"max_gen_length": length, "temperature": 0.0}
        parameters.append({"name": "out", "is_output": True, "sampling_config": sampling})
        template = SYSTEM + text + "".join(f" {{{{{name}}}}}" for name in names) + " {{out}}"
        response = await self.client.semantic_call(
            SemanticCallRequest.model_validate(
                self.scope | {"template": template, "parameters": parameters}
            )
        )
        return response.param_info[-1].var_id

    async def read(self, var_id: str, **options: Any) -> str:
        return await self.client.get_var(**self.scope, var_id=var_id, **options)


async def chain(program: Program, n: int) -> None:
    """A chain whose client reads each value before it submits the next call."""
    text = f"question {n}"
    for step in range(4):
        text = await program.read(await program.call(f"Step {step}:", 20 + n, value=text))
        await asyncio.sleep(0.05 * n)
    await program.client.delete_session(**program.scope)


async def map_reduce(program: Program, n: int) -> None:
    parts = [await program.call("Map", 30, value=f"{n} {k} " * 100) for k in range(6)]
    names = {f"part{k}": var_id for k, var_id in enumerate(parts)}
    final = await program.call("Reduce", 60, **names)
    async for _ in program.client.stream_var(**program.scope, var_id=final):
        pass


async def mixed(program: Program, n: int) -> None:
    """Variables set by the program, a native function, a read of the first of several variables,
    and a cancelled read."""
    late = await program.client.create_var(**program.scope, var_name="late")
    out = await program.call("Late", 25, late=late)
    source = "def double(text, out):\n    out.set(text + text)"
    native = await program.client.native_call(
        NativeCallRequest.model_validate(
            program.scope
            | {
                "func_name": "double",
                "func_source": source,
                "parameters": [
                    {"name": "text", "var_id": out},
                    {"name": "out", "is_output": True},
                ],
            }
        )
    )
    final = await program.call("End", 25, doubled=native.param_info[-1].var_id)
    unwanted = await program.call("Unwanted", 500, value="x" * 50)
    given_up = asyncio.create_task(program.read(unwanted))
    await asyncio.sleep(0.3)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    racers = [await program.call("Race", 10 * (k + 1), value=f"{k}") for k in range(4)]
    first = FirstVarsRequest.model_validate(program.scope | {"var_ids": racers, "k": 2})
    await program.core.first(first)
    await program.client.set_var(**program.scope, var_id=late, content="at last " * 30)
    await program.read(final)


def record(num_engines: int = 2, rtt_s: float = 0.0, sink: Any = None) -> Trace:
    async def main() -> Trace:
        trace = Trace()
        async with SimCluster(num_engines, engine=ENGINE, trace=sink or trace.add) as cluster:
            async with asyncio.TaskGroup() as group:
                for n, kind in enumerate([chain, map_reduce, mixed] * 4):
                    program = await Program.begin(cluster, rtt_s)
                    group.create_task(kind(program, n))
                    await asyncio.sleep(0.1)
            await asyncio.sleep(1)
            cluster.check_integrity()
        return trace

    return run_virtual(main())


def times(trace: Trace) -> list[float]:
    return [session.jct_s or 0.0 for session in trace.sessions]


@pytest.mark.parametrize("rtt_s", [0.0, 0.2])
def test_a_replay_with_the_same_settings_takes_the_same_time(rtt_s):
    recorded = record(rtt_s=rtt_s)
    replayed = Replay(engine=ENGINE).run(recorded)
    assert times(replayed) == pytest.approx(times(recorded), rel=0.03)
    assert [len(s.calls) for s in replayed.sessions] == [len(s.calls) for s in recorded.sessions]
    for old, new in zip(recorded.sessions, replayed.sessions, strict=True):
        assert [row.output_tokens for row in new.calls if row.kind == "semantic"] == [
            row.output_tokens for row in old.calls if row.kind == "semantic"
        ]
        prompts = [row.cached_tokens + row.computed_tokens for row in old.calls]
        assert [row.cached_tokens + row.computed_tokens for row in new.calls] == prompts


def test_a_replay_of_a_replay_is_the_same():
    once = Replay(engine=ENGINE).run(record())
    twice = Replay(engine=ENGINE).run(once)
    assert times(twice) == pytest.approx(times(once), rel=0.01)


def test_more_engines_and_less_memory_make_a_difference():
    recorded = record(num_engines=1)
    base = sum(times(Replay(engine=ENGINE).run(recorded)))
    assert sum(times(Replay(engine=ENGINE, num_engines=4).run(recorded))) < base
    assert sum(times(Replay(engine=ENGINE, kv_tokens=2000).run(recorded))) > base


def test_a_file_holds_the_same_and_no_text(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    sink = TraceFile(str(path))
    record(sink=sink)
    sink.close()
    content = path.read_text()
    assert "careful" not in content
    assert "question" not in content
    loaded = load_trace(path)
    in_memory = record()
    assert times(loaded) == times(in_memory)
    assert times(Replay(engine=ENGINE).run(loaded)) == pytest.approx(times(in_memory), rel=0.03)
    assert loaded.ended is not None
    assert loaded.ended.hit > 0
    path.write_text(content[: len(content) // 2])  # ServeCore was killed.
    half = load_trace(path)
    assert 0 < len(half.sessions) <= len(loaded.sessions)
    Replay(engine=ENGINE).run(half)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no session"),
        ('{"event": "trace", "version": 2}\n', "version 1"),
        ('{"event": "session", "at": 0, "session_id": 0, "tenant": "a"}\n', "version 1"),
        ('{"event": "trace"}\nnonsense\n', "line 2"),
        ('{"event": "trace"}\n{"event": "call", "at": 0}\n', "line 2"),
    ],
)
def test_invalid_traces_are_rejected(tmp_path: Path, content: str, message: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="trace_path"):
        TraceFile(str(tmp_path / "nowhere" / "trace.jsonl"))


def test_rejections_and_failed_reads_are_replayed():
    async def main() -> Trace:
        trace = Trace()
        async with SimCluster(1, engine=ENGINE, trace=trace.add) as cluster:
            program = await Program.begin(cluster, 0.0)
            slow = await program.call("slow", 400, value="x")
            for timeout in (0.1, None):
                request = VarGetRequest.model_validate(program.scope | {"timeout": timeout})
                with suppress(TimedOut):
                    await cluster.core.read(request, slow)
            await program.client.cancel_var(**program.scope, var_id=slow)
        return trace

    recorded = run_virtual(main())
    errors = [answer.error for answer in recorded.sessions[0].answers]
    assert errors == ["timed_out", None]
    replayed = Replay(engine=ENGINE).run(recorded)
    assert [answer.error for answer in replayed.sessions[0].answers] == errors
    assert times(replayed) == pytest.approx(times(recorded), rel=0.01)


def test_percentiles_interpolate():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 99) == 0.0


def test_conversations_without_sessions_are_replayed_as_they_went() -> None:
    """Two programs resend their histories. One of them disconnects in the middle of a turn."""
    trace = Trace()

    async def converse(turns: Turns, name: str, num_turns: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for number in range(num_turns):
            messages.append({"role": "user", "content": f"{name} asks {number}. " * 20})
            sampling = SamplingConfig(temperature=0.0, max_gen_length=30 + number)
            request = TurnRequest("tenant", "sim", list(messages), [sampling], program=name)
            turn = turns.submit(await turns.prepare(request))
            answer = (await turn.read(0)).content
            messages.append({"role": "assistant", "content": answer})
            turns.remember(turn, 0, messages[-1])
            await asyncio.sleep(0.3)
        last = replace(request, prompt=[*messages, messages[1]])
        turn = turns.submit(await turns.prepare(last))
        stream = turn.stream(0)
        await anext(stream)
        await stream.aclose()
        turn.cancel()

    async def record() -> None:
        async with SimCluster(trace=trace.add) as cluster:
            await cluster.add_engine(ENGINE.model_copy(update={"model": "sim"}))
            turns = Turns(cluster.core)
            await asyncio.gather(converse(turns, "a", 4), converse(turns, "b", 6))

    run_virtual(record())
    replayed = Replay(engine=ENGINE).run(trace)
    assert len(trace.sessions) == len(replayed.sessions) == 2
    for then, now in zip(trace.sessions, replayed.sessions, strict=True):
        assert [call.state for call in then.calls] == [call.state for call in now.calls]
        assert [call.state for call in now.calls][-2:] == ["done", "cancelled"]
        for before, after in zip(then.calls[:-1], now.calls[:-1], strict=True):
            tokens = before.cached_tokens + before.computed_tokens
            assert after.cached_tokens + after.computed_tokens == tokens
            assert after.cached_tokens == pytest.approx(before.cached_tokens, abs=CHUNK_CHARS)
            assert after.output_tokens == before.output_tokens
        assert all(call.cached_tokens > 2 * call.computed_tokens for call in now.calls[1:-1])
        assert now.jct_s == pytest.approx(then.jct_s, rel=0.02)
