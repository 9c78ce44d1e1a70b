"""`/v1/responses`, in OpenAI's format: turns whose items are stored."""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import orjson

from parrot.gateway.answers import AnswerParser, TextDelta
from parrot.gateway.turn_request import Prepared, TurnRequest
from parrot.gateway.turns import Turn, Turns, unknown_field
from parrot.gateway.vendors.endpoint import Caller
from parrot.gateway.vendors.openai_fields import Json, Refused, chained, program_of
from parrot.gateway.vendors.parts import AnswerEnd, Part, read_all, stream_parts, whole_parts
from parrot.gateway.vendors.responses.fields import (
    Asked,
    CancelRequest,
    ItemReference,
    ListRequest,
    OtherItem,
    ResponseItem,
    ResponseRequest,
    RetrieveRequest,
    output_items,
    template_messages,
)
from parrot.gateway.vendors.responses.store import (
    Fields,
    IdempotencyKey,
    KeptResponses,
    ResponseStore,
    StoredResponse,
)
from parrot.gateway.vendors.responses.writer import (
    Background,
    ResponseWriter,
    replayed_events,
    when_served,
)
from parrot.protocol.answers import Events
from parrot.protocol.errors import (
    Cancelled,
    Conflict,
    InternalError,
    InvalidRequest,
    NotFound,
    ParrotError,
    Unavailable,
    UnsupportedField,
)
from parrot.serve.config import CoreConfig
from parrot.utils.tasks import TaskSet


class _Ready(NamedTuple):
    """A response that can be submitted."""

    asked: Asked
    record: StoredResponse
    turn: Prepared


class Responses:
    """The endpoints' verbs. Owns the tasks of background responses; close it when done."""

    def __init__(self, turns: Turns, config: CoreConfig) -> None:
        self._turns = turns
        self._store = ResponseStore(config.responses_size, config.shard)
        self.kept = KeptResponses(self._store)
        self._tasks = TaskSet()

    async def close(self) -> None:
        await self._tasks.close()

    async def prepare(self, request: ResponseRequest, caller: Caller) -> "_Ready | None":
        """Render the prompt. None: a response has the request's idempotency key already."""
        request.require_support()
        once = _idempotency_key(request, caller)
        if once is not None and self._store.has_key(caller.tenant, once.key):
            return None
        record = self._record(request, caller.tenant)
        record.idempotency_key = once
        program = program_of(request, caller)
        asked = Asked(
            request, program, caller.traceparent, caller.request_id, caller.key, caller.client
        )
        return _Ready(asked, record, await self._prepared(asked, record))

    def create(
        self, request: ResponseRequest, caller: Caller, prepared: "_Ready | None"
    ) -> bytes | Awaitable[bytes] | AsyncGenerator[Events]:
        once = _idempotency_key(request, caller)
        if once is not None:
            known = self._store.find_by_idempotency_key(caller.tenant, once)
            if known is not None:
                return self._repeat_answer(known, request)
        assert prepared is not None, once
        asked, record, ready = prepared
        turn, parser = self._submit(asked, ready)
        caller.report_prefix(turn)
        sampling = self._turns.default_sampling(request.model).resolve(request.sampling())
        frame = request.frame(record.id, sampling) | chained(request, [turn])
        if request.is_deferred:
            return orjson.dumps(frame)
        if request.background:
            record.job = job = Background(turn, frame, partial(self.kept.stored, record))
            self._store.begin(record)
            self._begin(asked, frame, record)
            self._tasks.spawn(self._work(job, turn, parser, record), name=record.id)
            return job.events() if request.stream else job.body()
        writer = ResponseWriter(frame)
        if request.stream:
            return self._events(turn, parser, writer, record)
        return self._whole(turn, parser, writer, record)

    def _repeat_answer(
        self, record: StoredResponse, request: ResponseRequest
    ) -> bytes | AsyncGenerator[Events]:
        """The answer to a repeated request. Raises `Conflict` if the first one is not finished."""
        if record.job is not None:
            return record.job.events() if request.stream else record.body or record.job.body()
        if not record.body:
            text = "the first request with this key is still running: try again later"
            raise Conflict(text, param="Idempotency-Key")
        return self._repeat_events(record.body) if request.stream else record.body

    async def _repeat_events(self, body: bytes) -> AsyncGenerator[Events]:
        await self.kept.durable(is_stored=True)
        yield [(event["type"], event) for event in replayed_events(orjson.loads(body))]

    def _submit(self, asked: Asked, prepared: Prepared) -> tuple[Turn, AnswerParser]:
        turn = self._turns.submit(prepared)
        return turn, turn.parser(may_call_many=asked.request.parallel_tool_calls is not False)

    async def _prepared(
        self, asked: Asked, record: StoredResponse, *, is_resumed: bool = False
    ) -> Prepared:
        request, refused = asked.request, Refused()
        return await self._turns.prepare(
            TurnRequest(
                tenant=record.tenant,
                model=request.model,
                prompt=_messages(request, record, refused),
                samplings=[request.sampling()],
                options=request.template_options(),
                calls=request.call_rules(),
                program=asked.program,
                client=asked.client,
                func_name="responses",
                traceparent=asked.traceparent,
                request_id=asked.request_id,
                client_key=asked.client_key,
                criteria=request.effective_criteria,
                deadline=request.deadline,
                chain=request.chain(),
                unknown=request.model_extra or {},
                ignored=request.ignored,
                refused=refused,
                is_resumed=is_resumed,
            )
        )

    async def count(self, request: ResponseRequest, caller: Caller) -> bytes:
        """The number of tokens of the request's prompt."""
        request.require_support()
        if request.parrot is not None:
            text = "tokens cannot be counted with `parrot` fields: variables may have no values yet"
            raise UnsupportedField(text, param="parrot")
        refused: Refused = [unknown_field(name) for name in request.model_extra or ()]
        messages = _messages(request, self._record(request, caller.tenant), refused)
        for error in refused:
            raise error
        options = request.template_options()
        count = await self._turns.count_tokens(request.model, messages, options)
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": count})

    def retrieve(
        self, request: RetrieveRequest, response_id: str, caller: Caller
    ) -> Awaitable[bytes] | AsyncGenerator[Events]:
        record = self._store.find(response_id, caller.tenant)
        if request.stream:
            after = -1 if request.starting_after is None else request.starting_after
            return _job(record, "stream").events(after)
        return self._body(record, record.body or _job(record).body())

    async def _body(self, record: StoredResponse, body: bytes) -> bytes:
        """The body, once it is on disk: until then a restart may produce another answer."""
        await self.kept.stored(record)
        return body

    def cancel(self, request: CancelRequest, response_id: str, caller: Caller) -> bytes:
        """Cancel a background response. A finished one is returned unchanged."""
        record = self._store.find(response_id, caller.tenant)
        job = _job(record)
        job.cancel()
        self._keep(job.writer, record)
        record.is_cancelled = True
        return record.body

    def delete(self, response_id: str, caller: Caller) -> bytes:
        """Delete a response. Responses that continue it keep its items."""
        record = self._store.find(response_id, caller.tenant)
        self._store.remove(record)
        if record.job is not None:
            record.job.cancel()
        return orjson.dumps({"id": response_id, "object": "response", "deleted": True})

    def input_items(self, request: ListRequest, response_id: str, caller: Caller) -> bytes:
        """The input items of the response, including those of earlier responses, in pages."""
        items = self._store.find(response_id, caller.tenant).context()
        if request.order == "desc":
            items.reverse()
        begin = 0
        if request.after is not None:
            ids = [item.id for item in items]
            if request.after not in ids:
                raise NotFound(f"no such item: `{request.after}`", param="after")
            begin = ids.index(request.after) + 1
        page = items[begin : begin + request.limit]
        return orjson.dumps(
            {
                "object": "list",
                "data": [item.listed() for item in page],
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
                "has_more": begin + len(page) < len(items),
            }
        )

    def _record(self, request: ResponseRequest, tenant: str) -> StoredResponse:
        """A record with the request's items, which get ids, after the items of the previous
        response."""
        previous = None
        if request.previous_response_id is not None:
            param = "previous_response_id"
            previous = self._store.find(request.previous_response_id, tenant, param=param)
            if previous.output is None:
                text = f"response `{previous.id}` has no answer and cannot be continued"
                raise InvalidRequest(text, param=param)
            if previous.has_variables:
                text = f"response `{previous.id}` has variables in its prompt: send its items"
                raise InvalidRequest(text, param=param)
        token = self._store.new_token()
        items = list(self._items(request, tenant, token))
        has_variables = request.parrot is not None and bool(request.parrot.inputs)
        return StoredResponse(f"resp_{token}", tenant, previous, items, has_variables=has_variables)

    def _items(self, request: ResponseRequest, tenant: str, token: str) -> Iterator[ResponseItem]:
        """The items of the request's input. Their ids contain the response's token."""
        for i, item in enumerate(request.input):
            if isinstance(item, ResponseItem):
                item.id = f"{item.id_prefix}_{token}_i{i}"
                yield item
            elif isinstance(item, OtherItem):
                raise UnsupportedField(
                    f"items of type `{item.type}` are not supported", param=f"input.{i}.type"
                )
            elif isinstance(item, ItemReference) and not item.id.startswith("rs_"):
                found = self._store.find_item(item.id, tenant, param=f"input.{i}.id")
                yield found.model_copy(update={"id": f"{found.id_prefix}_{token}_i{i}"})

    async def _whole(
        self, turn: Turn, parser: AnswerParser, writer: ResponseWriter, record: StoredResponse
    ) -> bytes:
        with self._store.making(record):
            (value,) = await read_all([turn])
            for part in await whole_parts(turn, 0, value, parser):
                for _ in writer.write(part):
                    pass
            self._end(turn, writer, record)
        await self.kept.durable(is_stored=bool(record.body))
        return orjson.dumps(writer.response)

    async def _events(
        self, turn: Turn, parser: AnswerParser, writer: ResponseWriter, record: StoredResponse
    ) -> AsyncGenerator[Events]:
        with self._store.making(record):
            async with aclosing(self._stream_events(turn, parser, writer, record)) as events:
                async for some in events:
                    yield some

    async def _stream_events(
        self, turn: Turn, parser: AnswerParser, writer: ResponseWriter, record: StoredResponse
    ) -> AsyncGenerator[Events]:
        has_begun = False
        try:
            async with aclosing(_parts(turn, parser)) as parts:
                async for part in parts:
                    events = [] if has_begun else list(writer.begin())
                    has_begun = True
                    events += writer.write(part)
                    if isinstance(part, AnswerEnd):  # Store it before the client can refer to it.
                        self._end(turn, writer, record)
                        await self.kept.durable(is_stored=bool(record.body))
                    yield [(event["type"], event) for event in events]
        except ParrotError as error:
            if not has_begun:
                raise
            events = list(writer.write(error))
            self._keep(writer, record)
            yield [(event["type"], event) for event in events]

    async def _work(
        self, job: Background, turn: Turn, parser: AnswerParser, record: StoredResponse
    ) -> None:
        patient = replace(turn, is_patient=True)
        try:
            async with aclosing(_parts(patient, parser)) as parts:
                async for part in parts:
                    job.add(part)
                    if isinstance(part, AnswerEnd):
                        self._end(turn, job.writer, record)
        except ParrotError as error:
            job.add(error)
        finally:
            job.add(InternalError("internal error"))  # ends the streams after an unknown error
            self._keep(job.writer, record)

    def _end(self, turn: Turn, writer: ResponseWriter, record: StoredResponse) -> None:
        """Store the finished answer, so that other responses can continue it."""
        self._turns.remember(turn, 0, writer.answer.message())
        record.output = output_items(writer.response["output"])
        self._keep(writer, record)

    def _keep(self, writer: ResponseWriter, record: StoredResponse) -> None:
        """Store the finished response."""
        if writer.response["store"] and not record.body:
            record.body = orjson.dumps(writer.response)
            self._store.keep(record)
            self.kept.write(record)

    # After a restart

    def _begin(self, asked: Asked, frame: Json, record: StoredResponse) -> None:
        """Journal a background response. With variables, it is journaled as interrupted: after a
        restart its session runs the call, and the response is not resumed."""
        if asked.request.parrot is None:
            self.kept.write(record, asked.fields() | {"frame": frame})
            return
        record.body = _interrupted(frame)
        self.kept.write(record)
        record.body = b""

    def resume(self, joined: Callable[[], Awaitable[None]]) -> None:
        """Resume the responses that the journal contains as unfinished. Each waits for an engine
        with its model, which `joined` reports, and until the journal can be written."""
        for record, fields in self.kept.unfinished.values():
            record.job = Background(None, fields["frame"], partial(self.kept.stored, record))
            work = self._resume_one(record.job, fields, record, joined)
            self._tasks.spawn(work, name=record.id)
        self.kept.unfinished.clear()

    async def _resume_one(
        self,
        job: Background,
        fields: Fields,
        record: StoredResponse,
        joined: Callable[[], Awaitable[None]],
    ) -> None:
        async def submit() -> tuple[Turn, AnswerParser]:
            prepared = await self._prepared(asked, record, is_resumed=True)
            if job.has_ended:
                raise Cancelled("the response was cancelled")
            return self._submit(asked, prepared)

        try:
            asked = Asked.of(fields)
            turn, parser = await when_served(submit, joined, self.kept.writable)
        except ParrotError as error:
            job.add(error)
            self._keep(job.writer, record)
        else:
            job.turn = turn
            await self._work(job, turn, parser, record)


async def _parts(turn: Turn, parser: AnswerParser) -> AsyncGenerator[Part]:
    """The parts of an answer, after an empty text that opens the response."""
    has_begun = False
    async with aclosing(stream_parts(turn, [parser])) as answers:
        async for _, parts in answers:
            for part in parts if has_begun else (TextDelta(""), *parts):
                yield part
            has_begun = True


def _interrupted(frame: Json) -> bytes:
    """The body of a response that a restart has interrupted."""

    writer = ResponseWriter(frame)
    for _ in writer.write(Unavailable("ServeCore was restarted before the response was complete")):
        pass
    return orjson.dumps(writer.response)


def _idempotency_key(request: ResponseRequest, caller: Caller) -> IdempotencyKey | None:
    if caller.idempotency_key is None or not request.is_kept:
        return None
    return IdempotencyKey(caller.idempotency_key, _fingerprint(request))


def _fingerprint(request: ResponseRequest) -> str:
    return hashlib.sha256(request.model_dump_json(exclude={"stream"}).encode()).hexdigest()


def _messages(request: ResponseRequest, record: StoredResponse, refused: Refused) -> list[Json]:
    system: list[Json] = []
    if request.instructions is not None:
        system = [{"role": "system", "content": request.instructions}]
    return system + template_messages(record.context(), refused)


def _job(record: StoredResponse, param: str | None = None) -> Background:
    if record.job is None:
        text = f"response `{record.id}` was not created with `background: true`"
        raise InvalidRequest(text, param=param)
    return record.job
