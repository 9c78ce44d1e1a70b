"""Replays a recorded trace on virtual time.

A request that followed an answer is sent the recorded time after the simulated answer. Other
requests are sent at the recorded times. Texts are random strings of the recorded lengths. Equal
texts in the trace are equal in the replay."""

import asyncio
import random
import string
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from parrot.engine.config import SimConfig
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import (
    CallResponse,
    FirstVarsRequest,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    VarGetRequest,
)
from parrot.protocol.template import placeholder
from parrot.protocol.trace import (
    WITHDRAWN,
    AnswerLine,
    CallLine,
    CancelLine,
    DeleteLine,
    NativeLine,
    ReadLine,
    SessionEvent,
    SetLine,
    TraceParameter,
    TraceText,
    VariableLine,
)
from parrot.serve.config import CoreConfig, SessionQuota, TenantQuota
from parrot.serve.core import ServeCore
from parrot.simulation.cluster import PATIENT, SimCluster
from parrot.simulation.loop import run_virtual
from parrot.simulation.natives import NATIVE_S, RecordedSandbox
from parrot.simulation.trace import TokenCounts, Trace, TracedSession

_LETTERS = f"{string.ascii_letters}{string.digits} .".encode()
_TO_LETTERS = bytes(_LETTERS[byte % len(_LETTERS)] for byte in range(256))
_MAX_DRAWS = 100
_UNLIMITED = 2**31 - 1
_PLENTY = {"calls": _UNLIMITED, "variables": _UNLIMITED, "text_bytes": _UNLIMITED}
_NO_QUOTAS = {"session_quota": SessionQuota(**_PLENTY), "tenant_quota": TenantQuota(**_PLENTY)}
_KEPT_SAMPLING = frozenset({"temperature", "seed", "max_gen_length"})


@dataclass(frozen=True, slots=True)
class Replay:
    """Settings of a replay."""

    engine: SimConfig = field(default_factory=SimConfig)  # Step costs and limits.
    core: CoreConfig = PATIENT
    num_engines: int | None = None  # None: the recorded number.
    kv_tokens: int | None = None  # KV capacity of each engine. None: the recorded capacity.

    def run(self, trace: Trace) -> Trace:
        """Simulate the trace with these settings. The order of the sessions does not change."""
        return run_virtual(self._run(trace))

    async def _run(self, trace: Trace) -> Trace:
        result = Trace()
        texts = Texts(TokenCounts(trace.sessions))
        sandbox = RecordedSandbox()
        scheduler = self.core.global_scheduler.model_copy(update={"max_queue_size": _UNLIMITED})
        core = self.core.model_copy(update={"global_scheduler": scheduler} | _NO_QUOTAS)
        async with SimCluster(core=core, sandbox=sandbox, trace=result.add) as cluster:
            for config in self._engines(trace):
                await cluster.add_engine(config)
            async with asyncio.TaskGroup() as group:
                for session in trace.sessions:
                    player = _Player(session, cluster.core, texts, sandbox)
                    group.create_task(player.play(), name=f"session {session.began.session_id}")
        return result

    def _engines(self, trace: Trace) -> Iterator[SimConfig]:
        """The configs of the engines. Without recorded engines, all settings come from `engine`."""
        size = self.engine.instance.block_size
        count = self.num_engines or len(trace.engines) or 1
        for index in range(count):
            changes: dict[str, Any] = {}
            num_tokens = self.kv_tokens
            if trace.engines:
                recorded = trace.engines[index % len(trace.engines)]
                changes = {"model": recorded.model, "tasks_capacity": recorded.tasks_capacity}
                num_tokens = num_tokens or recorded.tokens_capacity
            if num_tokens is not None:
                blocks = max(1, num_tokens // size)
                changes["instance"] = self.engine.instance.model_copy(
                    update={"num_kv_cache_blocks": blocks}
                )
            yield self.engine.model_copy(update=changes)


class Texts:
    """Random texts with one token per character. Equal texts in the trace get equal texts."""

    def __init__(self, counts: TokenCounts) -> None:
        self._counts = counts
        self._made: dict[str, str] = {}  # Chunks by text id.
        self._used: set[str] = set()

    def of(self, text: TraceText) -> str:
        parts = zip(text.ids, text.lengths(), strict=True)
        return "".join(self._chunk(text_id, num_chars) for text_id, num_chars in parts)

    def _chunk(self, text_id: str, num_chars: int) -> str:
        """Random letters for an id. Draws again if they equal another chunk, which can happen for
        short chunks."""
        if (known := self._made.get(text_id)) is not None:
            return known
        length = self._counts.of(text_id, num_chars)
        draw = random.Random(text_id)
        for _ in range(_MAX_DRAWS):
            made = draw.randbytes(length).translate(_TO_LETTERS).decode()
            if made not in self._used:
                break
        self._used.add(made)
        self._made[text_id] = made
        return made


class _Player:
    """Replays the requests of one session's program."""

    def __init__(
        self, session: TracedSession, core: ServeCore, texts: Texts, sandbox: RecordedSandbox
    ) -> None:
        self._session = session
        self._core = core
        self._texts = texts
        self._sandbox = sandbox
        self._rows = {row.output_var_id: row for row in session.calls}
        self._scope: dict[str, Any] = {}
        self._vars: dict[str, str] = {}  # Recorded var_id to replayed var_id.
        self._requests: dict[int, int] = {}  # Recorded request_id to replayed request_id.
        self._reads: dict[int, asyncio.Task[float]] = {}

    async def play(self) -> None:
        """Replay all events. Each event waits for all earlier answers, then for the recorded time
        between the last of these answers and the event."""
        loop = asyncio.get_running_loop()
        recorded = self._session.began.at
        now = recorded
        await asyncio.sleep(max(0.0, now - loop.time()))
        request = SessionCreateRequest(on_demand=self._session.began.on_demand)
        self._scope = self._core.create_session(request).model_dump()
        for event in self._session.events:
            read = self._reads.get(event.read_id) if isinstance(event, AnswerLine) else None
            if read is not None and isinstance(event, AnswerLine) and event.error != WITHDRAWN:
                now = max(now, await read)
                recorded = event.at
                continue
            await asyncio.sleep(max(0.0, now + event.at - recorded - loop.time()))
            if read is not None:
                read.cancel()
            with suppress(ParrotError):  # A rejected request does not stop the replay.
                self._do(event)
        for read in self._reads.values():
            read.cancel()

    def _do(self, event: SessionEvent) -> None:
        match event:
            case CallLine():
                self._submit(event)
            case NativeLine():
                self._submit_native(event)
            case VariableLine():
                content = None if event.value is None else self._texts.of(event.value)
                self._vars[event.var_id] = self._core.create_var(
                    **self._scope, var_name=event.name, content=content
                )
            case SetLine():
                var_id, text = self._vars[event.var_id], self._texts.of(event.value)
                self._core.set_var(**self._scope, var_id=var_id, content=text)
            case ReadLine():
                self._reads[event.read_id] = asyncio.create_task(
                    self._read(event), name=f"read {event.read_id}"
                )
            case CancelLine(var_id=str(var_id)):
                self._core.cancel_var(**self._scope, var_id=self._vars[var_id])
            case CancelLine(request_id=int(request_id)):
                self._core.cancel_call(**self._scope, request_id=self._requests[request_id])
            case DeleteLine():
                self._core.delete_session(**self._scope)
            case _:
                pass

    def _submit(self, event: CallLine) -> None:
        pieces = (
            placeholder(piece) if isinstance(piece, str) else self._texts.of(piece)
            for piece in event.pieces
        )
        fields = self._scope | event.options
        fields["template"] = "".join(pieces)
        fields["parameters"] = [self._parameter(parameter) for parameter in event.parameters]
        fields.pop("chat", None)
        if "successor_of" in fields:
            fields["successor_of"] = self._requests[fields["successor_of"]]
        request = SemanticCallRequest.model_validate(fields)
        self._note_ids(event, self._core.submit_call(request))

    def _submit_native(self, event: NativeLine) -> None:
        fields = self._scope | event.options
        fields["func_name"] = event.func_name
        fields["func_source"] = "def recorded(): pass"
        fields["parameters"] = [self._parameter(p, is_native=True) for p in event.parameters]
        response = self._core.submit_native(NativeCallRequest.model_validate(fields))
        self._note_ids(event, response)
        outputs = [parameter.var_id for parameter in event.parameters if parameter.is_output]
        row = self._rows.get(outputs[0])
        seconds = NATIVE_S
        if row is not None and row.finished_s is not None and row.started_s is not None:
            seconds = row.finished_s - row.started_s
        made = self._session.native_texts
        texts = [self._texts.of(made[var_id]) if var_id in made else "" for var_id in outputs]
        session_id = self._scope["session_id"]
        self._sandbox.expect(session_id, response.request_id, seconds, texts)

    def _note_ids(self, event: CallLine | NativeLine, response: CallResponse) -> None:
        self._requests[event.request_id] = response.request_id
        new_ids = {info.parameter_name: info.var_id for info in response.param_info}
        self._vars |= {old.var_id: new_ids[old.name] for old in event.parameters}

    def _parameter(self, parameter: TraceParameter, *, is_native: bool = False) -> dict[str, Any]:
        fields: dict[str, Any] = {"name": parameter.name, "is_output": parameter.is_output}
        if parameter.was_bound:
            fields["var_id"] = self._vars[parameter.var_id]
        if parameter.value is not None:
            fields["value"] = self._texts.of(parameter.value)
        if parameter.is_output and not is_native:
            fields["sampling_config"] = self._sampling(parameter)
        return fields

    def _sampling(self, parameter: TraceParameter) -> dict[str, Any]:
        """Sampling for an output of the recorded length. The trace does not record why an output
        ended."""
        recorded = parameter.sampling_config or {}
        sampling = {key: value for key, value in recorded.items() if key in _KEPT_SAMPLING}
        row = self._rows.get(parameter.var_id)
        if row is not None and row.output_tokens:
            sampling["max_gen_length"] = row.output_tokens
        return sampling

    async def _read(self, event: ReadLine) -> float:
        """Returns the virtual time of the answer."""
        var_ids = [self._vars[var_id] for var_id in event.var_ids]
        fields = self._scope | event.options
        with suppress(ParrotError):
            if event.k is not None:
                fields |= {"var_ids": var_ids, "k": event.k}
                await self._core.first(FirstVarsRequest.model_validate(fields))
            elif event.is_stream:
                request = VarGetRequest.model_validate(fields)
                async for _ in self._core.stream(request, var_ids[0]):
                    pass
            else:
                await self._core.read(VarGetRequest.model_validate(fields), var_ids[0])
        return asyncio.get_running_loop().time()
