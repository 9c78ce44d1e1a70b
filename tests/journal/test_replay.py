"""Replaying any number of records restores the state after these records."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.gateway.programs import ENDING
from parrot.gateway.turn_request import TurnChain, TurnRequest
from parrot.gateway.turns import Turns
from parrot.journal import replay as restoring
from parrot.journal.log import ENDED, Journal, Kind, Record
from parrot.journal.replay import restore
from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    ModelNumerics,
    NotFound,
    ParrotError,
    SessionGone,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import (
    GraphRequest,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    VarCreateRequest,
    VarGetRequest,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import CompletionState
from parrot.serve.sessions import Session
from tests.journal.replayed import MemoryFile, _error, asked_calls, state_of
from tests.support.examples import examples
from tests.support.held_world import held_engine
from tests.support.manual_clock import ManualClock

Choose = Callable[[int], int]


class World:
    """A ServeCore with a journal that initially has `records`."""

    def __init__(self, records: list[Record], first_session_id: int = 0) -> None:
        self.file = MemoryFile(records)
        self.clock = ManualClock(start=1e6)
        self.journal = Journal(self.file, self.clock)
        self.engine = held_engine(model="m", text=False)
        config = CoreConfig(
            cluster_token="of both",  # so that their cache salts are equal
            engine_heartbeat_timeout=1e9,
        )
        self.core = ServeCore(
            config,
            clock=self.journal.clock,
            dispatcher=Dispatcher(config, self.journal.clock, lambda info: self.engine),
            sandbox=_NoSandbox(),
            first_session_id=first_session_id,
        )
        self.turns = Turns(self.core)
        restore(self.core, self.journal, {ENDING: self.turns.restore_ending})
        self.turns.restored()
        self.reads: list[asyncio.Task[Any]] = []

    async def join(self) -> None:
        await self.core.register_engine(RegisterRequest(engine_config=self.engine.info))

    async def settle(self) -> None:
        await self.clock.advance(0)

    def restore_all(self) -> None:
        for session in self.core.sessions:
            self.core.sessions.find(session.id)

    async def close(self) -> None:
        for read in self.reads:
            read.cancel()
        await asyncio.gather(*self.reads, return_exceptions=True)
        await self.core.close()
        await self.journal.close()


class _NoSandbox:
    async def evaluate(self, call: Any) -> list[object]:
        await asyncio.Event().wait()
        return []

    async def close(self) -> None: ...


class Program:
    """A program whose actions `choose` determines."""

    def __init__(self, world: World, choose: Choose) -> None:
        self.world = world
        self.core = world.core
        self.choose = choose

    def begin(self, session: Session | None) -> None:
        apps = [["a"], []][self.choose(2)]
        self.core.create_session(SessionCreateRequest(apps=apps, on_demand=self.choose(2) == 0))

    def end(self, session: Session) -> None:
        if self.choose(4) == 0:
            self.core.delete_session(session.id, session.auth)

    def variable(self, session: Session) -> None:
        content = [None, "", "text"][self.choose(3)]
        self.core.create_var(session.id, session.auth, "v", content)

    def set(self, session: Session) -> None:
        if var_id := self._any_variable(session):
            self.core.set_var(session.id, session.auth, var_id, "set")

    def cancel(self, session: Session) -> None:
        calls = list(session.graph.calls)
        if calls and self.choose(2):
            request_id = calls[self.choose(len(calls))]
            self.core.cancel_call(session.id, session.auth, request_id)
        elif var_id := self._any_variable(session):
            self.core.cancel_var(session.id, session.auth, var_id)

    def call(self, session: Session) -> None:
        body = self._scope(session) | {
            "template": "f {{x}} then {{a}} and {{b}}",
            "parameters": [self._input(session, "x"), self._output(session, "a"), _output("b")],
            "func_name": ["f", None][self.choose(2)],
            "chat": self.choose(2) == 0,
            "output_criteria": [PerformanceCriteria.LATENCY, None][self.choose(2)],
        }
        if self.choose(3) == 0:
            body["idempotency_key"] = f"k{self.choose(2)}"
        if session.graph.calls and self.choose(3) == 0:
            body["successor_of"] = list(session.graph.calls)[self.choose(len(session.graph.calls))]
        self.core.submit_call(SemanticCallRequest.model_validate(body))

    def native(self, session: Session) -> None:
        body = self._scope(session) | {
            "func_name": "g",
            "func_source": "def g(x, y, z): pass",
            "parameters": [self._input(session, "x"), _output("y"), _output("z")],
        }
        self.core.submit_native(NativeCallRequest.model_validate(body))

    def graph(self, session: Session) -> None:
        calls = [
            {
                "template": "h {{p}} {{q}}",
                "parameters": [{"name": "p", "var": "one"}, _output("q") | {"var": "two"}],
            },
            {
                "template": "h {{p}} {{q}}",
                "parameters": [{"name": "p", "var": "two"}, _output("q")],
                "on_demand": True,
            },
        ]
        variables = [{"name": "one", "content": [None, "1"][self.choose(2)]}]
        body = self._scope(session) | {"variables": variables, "calls": calls}
        if self.choose(3) == 0:
            body["idempotency_key"] = f"k{self.choose(2)}"
        self.core.submit_graph(GraphRequest.model_validate(body))

    def turn(self, session: Session | None) -> None:
        chain = None
        if session is not None and self.choose(2):
            var_id = self._any_variable(session)
            inputs = {"p": var_id} if var_id else {}
            chain = TurnChain(session.id, session.auth, inputs, is_deferred=self.choose(2) == 0)
        request = TurnRequest(
            "public",
            "m",
            "say {{p}}" if chain is not None and chain.inputs else "say",
            [SamplingConfig(max_gen_length=5, seed=3, logprobs=1), SamplingConfig()],
            program=["p", None][self.choose(2)],
            func_name="turn",
            chain=chain,
        )
        self.world.turns.submit(self.world.turns.render(request))

    def read(self, session: Session) -> None:
        if var_id := self._any_variable(session):
            request = VarGetRequest(session_id=session.id, session_auth=session.auth)
            reading = asyncio.ensure_future(self.core.read(request, var_id))
            self.world.reads.append(reading)

    def run(self, session: Session) -> None:
        """Let the engine finish a call or fail. After a failure, it may get the call again."""
        held = self.world.engine.held
        if not held:
            return
        call = held[self.choose(len(held))]
        match self.choose(4):
            case 0:
                call.answer.set_exception(EngineFailed("no"))
            case 1:
                call.answer.set_exception(ModelNumerics("NaN"))
            case known:
                self.world.engine.answer(call, "made", with_ids=known == 2)

    def _scope(self, session: Session) -> dict[str, Any]:
        return {"session_id": session.id, "session_auth": session.auth}

    def _any_variable(self, session: Session) -> str | None:
        known = list(session.graph.variables)
        return known[self.choose(len(known))] if known else None

    def _input(self, session: Session, name: str) -> dict[str, Any]:
        var_id = self._any_variable(session)
        if var_id is None or self.choose(2):
            return {"name": name, "value": "given"}
        return {"name": name, "var_id": var_id}

    def _output(self, session: Session, name: str) -> dict[str, Any]:
        var_id = self._any_variable(session)
        sampling = {"sampling_config": {"max_gen_length": 4, "stop_str": ["."]}}
        named = {} if var_id is None or self.choose(3) else {"var_id": var_id}
        return _output(name) | sampling | named


def _output(name: str) -> dict[str, Any]:
    return {"name": name, "is_output": True}


ANYWHERE = ("begin", "turn")
INSIDE = ("call", "run", "read", "set", "run", "cancel", "variable", "native", "graph", "end")


async def _run_and_replay(data: st.DataObject) -> None:
    def choose(count: int) -> int:
        return data.draw(st.integers(0, count - 1))

    world = World([])
    await world.join()
    program = Program(world, choose)
    states = {0: (state_of(world.core), asked_calls(world.core))}
    try:
        for _ in range(data.draw(st.integers(1, 20))):
            sessions = list(world.core.sessions)
            names = (*INSIDE, *ANYWHERE) if sessions else ANYWHERE
            verb = getattr(program, names[choose(len(names))])
            before = state_of(world.core)
            try:
                verb(sessions[choose(len(sessions))] if sessions else None)
            except (ParrotError, InvalidRequest):
                assert state_of(world.core) == before, verb
            await world.settle()  # reads start, and calls run
            await world.journal.durable()  # otherwise later draws depend on the journal's thread
            await world.settle()
            world.core.check_integrity()
            states[world.journal._seq] = state_of(world.core), asked_calls(world.core)
        await world.journal.durable()
        records = world.file.records.copy()
    finally:  # Hypothesis stops examples that draw too much
        await world.close()
    for count in range(len(records) + 1):
        again = World(records[:count])
        again.restore_all()
        again.core.check_integrity()
        if (known := states.get(count)) is not None:
            _check_restored(state_of(again.core), *known)
        await again.close()


def _check_restored(
    found: dict[int, Any], known: dict[int, Any], asked: dict[int, set[int]]
) -> None:
    """Readers are not in the journal. So a call may be held again although its reader had left. A
    call that a reader was waiting for may be released: its reader is gone after the restart."""
    for number, after in _without_orphans(found).items():
        before = known[number]
        assert after["calls"] is None or before["held"] - asked[number] <= after["held"]
        after["held"] = before["held"]
    assert found == _without_orphans(known)


def _without_orphans(state: dict[int, Any]) -> dict[int, Any]:
    """Remove answers of turns without a client, which are cancelled after a restart."""
    for session in state.values():
        orphans = [
            task for tasks in session["calls"].values() for task in tasks if task[1] == "turn"
        ]
        if orphans:
            session["calls"] = session["variables"] = None
    return state


@given(st.data())
@settings(max_examples=examples(50), deadline=None)
def test_each_prefix_of_the_records_restores_its_state(data: st.DataObject) -> None:
    asyncio.run(_run_and_replay(data))


async def test_session_ids_never_repeat_although_the_clock_was_set_back() -> None:
    records: list[Record] = []
    given: list[int] = []
    auths: list[str] = []
    for first in (5000, 100, 4000):  # the time of the clock at each start
        world = World(records, first)
        scopes = [world.core.create_session(SessionCreateRequest()) for _ in range(3)]
        given += [scope.session_id for scope in scopes]
        auths += [scope.session_auth for scope in scopes]
        for scope in scopes:
            world.core.delete_session(**scope.model_dump())
        await world.journal.durable()
        ended = {record.subject for record in world.file.records if record.kind == ENDED}
        # Records of ended sessions are trimmed.
        records = [r for r in world.file.records if r.subject not in ended]
        assert len(records) == 1
        await world.close()
    numbers = [world.core.sessions.numbers.number_of(one) for one in given]
    assert numbers == sorted(set(numbers))
    assert len(set(given)) == len(given)
    world = World(records)
    with pytest.raises(SessionGone):
        world.core.session_info(given[0], auths[0])
    await world.close()


async def test_an_error_is_returned_after_it_is_on_disk() -> None:
    world = World([])
    scope = world.core.create_session(SessionCreateRequest()).model_dump()
    var_id = world.core.create_var(**scope, var_name="v", content=None)
    await world.journal.durable()
    write, may_write = world.file.write, threading.Event()

    def wait_and_write(records: list[Record]) -> None:
        assert may_write.wait(10)
        write(records)

    world.file.write = wait_and_write  # type: ignore[method-assign]
    request = VarGetRequest(**scope, timeout=60)
    reading = asyncio.ensure_future(world.core.read(request, var_id))
    await asyncio.sleep(0)
    world.core.cancel_var(**scope, var_id=var_id)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reading.done()
    may_write.set()
    with pytest.raises(Cancelled):
        await reading
    assert Kind.SETTLED in [record.kind for record in world.file.records]
    await world.close()


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_value_is_returned_after_it_is_on_disk_although_its_session_ends(
    is_stopped: bool,
) -> None:
    world = World([])
    scope = world.core.create_session(SessionCreateRequest()).model_dump()
    var_id = world.core.create_var(**scope, var_name="v", content=None)
    request = VarGetRequest(**scope, timeout=60)
    reading = asyncio.ensure_future(world.core.read(request, var_id))
    await asyncio.sleep(0)
    await world.journal.durable()
    write, may_write = world.file.write, threading.Event()

    def wait_and_write(records: list[Record]) -> None:
        assert may_write.wait(10)
        write(records)

    world.file.write = wait_and_write  # type: ignore[method-assign]
    world.core.set_var(**scope, var_id=var_id, content="one")
    if is_stopped:
        world.core.shut_down()
    else:
        world.core.delete_session(**scope)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reading.done()
    may_write.set()
    assert (await reading).content == "one"
    assert Kind.SETTLED in [record.kind for record in world.file.records]
    await world.close()


async def test_a_call_cancelled_before_a_failure_reached_it_stays_cancelled() -> None:
    world = World([])
    world.core.sessions.backlog.per_slice = 1  # like with a large backlog
    scope = world.core.create_session(SessionCreateRequest()).model_dump()
    var_id = world.core.create_var(**scope, var_name="v", content=None)
    parameters = [{"name": "x", "var_id": var_id}, _output("y")]
    body = scope | {"template": "{{x}} {{y}}", "parameters": parameters}
    request = SemanticCallRequest.model_validate(body)
    call = [world.core.submit_call(request) for _ in range(4)][-1]
    world.core.cancel_var(**scope, var_id=var_id)
    world.core.cancel_call(**scope, request_id=call.request_id)
    await world.journal.durable()
    again = World(world.file.records.copy())
    again.restore_all()
    for core in (world.core, again.core):
        session = core.sessions.find(scope["session_id"])
        assert session is not None
        (task,) = session.graph.calls[call.request_id].tasks
        assert _error(task.outputs[0].error) == _error(Cancelled("request 4 was cancelled"))
        assert task.state is CompletionState.CANCELLED
        await core.close()
    await world.close()
    await again.close()


async def test_calls_wait_for_a_model_from_before_the_restart() -> None:
    world = World([])
    await world.join()  # an engine of the model `m`
    await world.journal.durable()
    await world.close()
    again = World(world.file.records)
    again.engine = held_engine(model="another", text=False)
    await again.join()
    scope = again.core.create_session(SessionCreateRequest()).model_dump()
    body = scope | {"template": "a{{y}}", "parameters": [{"name": "y", "is_output": True}]}
    again.core.submit_call(SemanticCallRequest(**body, models=["m"]))
    with pytest.raises(NotFound, match="available: another"):
        again.core.submit_call(SemanticCallRequest(**body, models=["nobody"]))
    await again.close()


async def test_a_session_that_cannot_be_restored_affects_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World([])
    whole, broken = [world.core.create_session(SessionCreateRequest()) for _ in range(2)]
    for session in (whole, broken):
        scope = session.model_dump()
        var_id = world.core.create_var(**scope, var_name="v", content=None)
        world.core.set_var(**scope, var_id=var_id, content="text")
    await world.journal.durable()
    records = [
        record._replace(payload=b'{"variable":"no such"}')
        if (record.subject, record.kind) == (str(broken.session_id), Kind.SETTLED)
        else record
        for record in world.file.records
    ]
    orphan = Record(len(records) + 1, 1.0, "77", Kind.READ, b"{}")  # its session does not exist
    await world.close()
    again = World([*records, orphan])
    again.restore_all()
    assert list(state_of(again.core)) == [whole.session_id]
    with pytest.raises(SessionGone):
        again.core.session_info(broken.session_id, broken.session_auth)
    await again.journal.durable()
    ended = [record.subject for record in again.file.records if record.kind == ENDED]
    assert sorted(ended) == sorted(["77", str(broken.session_id)])
    assert "cannot be restored" in caplog.text
    await again.close()


async def _few_calls(world: World, count: int = 3) -> list[dict[str, Any]]:
    """Create sessions with two calls each: a finished one and a running one."""
    await world.join()
    scopes = []
    for i in range(count):
        scope = world.core.create_session(SessionCreateRequest()).model_dump()
        made = [_call(world, scope, f"{which} of {i}") for which in ("first", "second")]
        read = VarGetRequest(**scope)
        for var_id in made:
            world.reads.append(asyncio.ensure_future(world.core.read(read, var_id)))
        await world.settle()
        world.engine.answer(world.engine.find(f"first of {i}"), f"text {i}")
        await world.settle()
        scopes.append(scope | {"made": made})
    await world.journal.durable()
    return scopes


def _call(world: World, scope: dict[str, Any], name: str = "f") -> str:
    parameters = [_output("a")]
    body = scope | {"template": f"{name}: {{{{a}}}}", "parameters": parameters, "chat": False}
    made = world.core.submit_call(SemanticCallRequest.model_validate(body))
    return made.param_info[0].var_id or ""


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore sessions only on demand."""
    monkeypatch.setattr(restoring, "_restore_dormant", lambda core: None)


def _scope(known: dict[str, Any]) -> dict[str, Any]:
    return {name: known[name] for name in ("session_id", "session_auth")}


@pytest.mark.usefixtures("asleep")
async def test_a_session_is_restored_on_demand_while_others_continue() -> None:
    world = World([])
    first, second, third = await _few_calls(world)
    ids = {task for call in _tasks(world) for task in call}
    again = World(world.file.records.copy())
    await again.join()
    await world.close()
    assert list(again.core.sessions.dormant) == [first["session_id"], second["session_id"]]
    again.core.check_integrity()
    new = again.core.create_session(SessionCreateRequest()).model_dump()
    _call(again, new)
    await again.clock.advance(7.0)
    value = await again.core.read(VarGetRequest(**_scope(first)), first["made"][0])
    assert value.content == "text 0"
    _call(again, _scope(first))
    active = again.clock.now()
    again.core.check_integrity()
    await again.clock.advance(1.0)
    assert [call.name for call in again.engine.held].count("second of 0") == 1
    session = again.core.sessions.find(first["session_id"])
    assert session is not None
    assert session.last_active == active
    assert list(again.core.sessions.dormant) == [second["session_id"]]
    again.core.delete_session(**_scope(second))
    again.restore_all()
    now = [task for call in _tasks(again) for task in call]
    assert len(set(now)) == len(now)
    assert len(set(now) - ids) == 2
    await again.journal.durable()
    last = World(again.file.records.copy())
    await again.close()
    last.restore_all()
    assert [s.id for s in last.core.sessions] == [s["session_id"] for s in (first, third, new)]
    await last.close()


@pytest.mark.usefixtures("asleep")
async def test_a_session_counts_for_its_tenant_before_it_is_restored() -> None:
    world = World([])
    scopes = [_scope(scope) for scope in await _few_calls(world, 5)]
    large = scopes[0] | {"var_name": "large", "content": "x" * 100_000}
    world.core.create_var(**dict(VarCreateRequest.model_validate(large)))
    call = {"template": "f {{a}}", "parameters": [{"name": "a", "is_output": True}]}
    graph = scopes[1] | {"calls": [call, call]}
    world.core.submit_graph(GraphRequest.model_validate(graph))
    await world.journal.durable()
    tenant = _tenant(world)
    again = World(world.file.records.copy())
    await world.close()
    assert len(again.core.sessions.dormant) == 4
    held = _tenant(again)
    assert held["calls"] == tenant["calls"] == 12
    assert held["sessions"] == tenant["sessions"] == 5
    assert 5 <= held["variables"] <= tenant["variables"]
    assert 99_000 < held["text_bytes"] < tenant["text_bytes"]
    again.core.check_integrity()
    again.core.delete_session(**scopes[2])  # this subtracts its usage
    again.restore_all()
    assert _tenant(again)["calls"] == 10
    await again.close()


def _tenant(world: World) -> Counter[str]:
    (session, *_) = world.core.sessions
    assert session.account.parent is not None
    return Counter(session.account.parent.used)


def _tasks(world: World) -> list[list[int]]:
    graphs = [session.graph for session in world.core.sessions]
    return [[task.id for task in call.tasks] for g in graphs for call in g.calls.values()]


@pytest.mark.usefixtures("asleep")
async def test_a_session_that_cannot_be_restored_on_demand_is_removed() -> None:
    world = World([])
    broken, idle, _ = await _few_calls(world)
    records = [
        record._replace(payload=b"{}")
        if (record.subject, record.kind) == (str(broken["session_id"]), Kind.SETTLED)
        else record
        for record in world.file.records
    ]
    await world.close()
    again = World(records)
    await again.join()
    with pytest.raises(SessionGone):
        again.core.session_info(**_scope(broken))
    await again.clock.advance(700.0)  # the other one runs, so it has not expired
    assert again.core.sessions.find(idle["session_id"]) is not None
    again.core.check_integrity()
    await again.journal.durable()
    ended = [record.subject for record in again.file.records if record.kind == ENDED]
    assert ended == [str(broken["session_id"])]
    await again.close()


async def test_many_sessions_are_restored_in_small_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World([])
    scopes = await _few_calls(world, 20)
    for _ in range(80):
        _call(world, _scope(scopes[0]))
    call = {"template": "f {{x}}", "parameters": [{"name": "x", "is_output": True}]}
    graph = {**_scope(scopes[1]), "calls": [call] * 512}
    for _ in range(3):
        world.core.submit_graph(GraphRequest.model_validate(graph))
    await world.journal.durable()
    before = state_of(world.core)
    monkeypatch.setattr(restoring, "_TURN_S", 0.0)
    again = World(world.file.records.copy())
    dormant = again.core.sessions.dormant
    assert scopes[0]["session_id"] not in dormant
    assert scopes[1]["session_id"] not in dormant
    assert len(dormant) == 17  # one session has been restored
    for _ in range(10_000):
        await asyncio.sleep(0)
        if not dormant:
            break
    assert not dormant
    assert state_of(again.core) == before
    again.core.check_integrity()
    await again.close()
    await world.close()
