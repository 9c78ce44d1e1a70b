"""Endpoints in a vendor's format: who asks, and errors as the vendor's clients read them."""

import inspect
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

import orjson
from fastapi import Request, Response
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    model_validator,
)

from parrot.gateway.turns import Turn
from parrot.protocol.answers import EventStream, error_headers, request_id_of, run_until_disconnect
from parrot.protocol.endpoint import (
    Access,
    Described,
    Endpoint,
    api_key_of,
    idempotency_key_of,
    read_json,
)
from parrot.protocol.errors import InternalError, InvalidRequest, ParrotError
from parrot.serve.core import ServeCore
from parrot.serve.durability import Wait, lasting
from parrot.utils.shard import ElsewhereError
from parrot.utils.traceparent import TraceParent

logger = logging.getLogger(__name__)

_PROGRAM_HEADERS = ("x-parrot-program", "x-session-affinity", "x-session-id", "session_id")
_MAX_NAME = 1024  # characters
_MAX_DEPTH = 246  # of JSON: what writes it can do 254

Verb = Callable[..., Any]
ErrorBody = Callable[[ParrotError, str], tuple[int, dict[str, Any]]]
"""The status and the JSON of an error, from it and the request's id."""


_MAX_FIELDS = 256  # of an object


class Caller(NamedTuple):
    """Who asks. `program`: what a header calls it, if one does. `headers` of the answer may be
    added to. `traceparent`: the caller's span; empty: none. `idempotency_key`: what is made with it
    is made once, where that is kept."""

    tenant: str
    program: str | None
    request_id: str
    headers: dict[str, str]
    traceparent: str = ""
    idempotency_key: str | None = None

    def tell(self, turn: Turn) -> None:
        """Say in a header what the turn's prompt shares with the one before it."""
        self.headers["x-parrot-prefix"] = turn.prefix


class VendorAnswer(BaseModel):
    """An answer in the vendor's format, of which the vendor documents more. It only describes."""

    model_config = ConfigDict(extra="allow")


class Bounded(BaseModel):
    """Base of objects with any fields, but not with a million, which would take seconds."""

    model_config = ConfigDict(
        extra="allow", defer_build=True, json_schema_extra={"maxProperties": _MAX_FIELDS}
    )

    @model_validator(mode="before")
    @classmethod
    def _require_few_fields(cls, value: Any) -> Any:
        _check_size(value)
        return value


def _check_size(value: Any) -> None:
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise ValueError(f"an object has more than {_MAX_FIELDS} fields")


class Wire(Bounded):
    """Base of what clients send: fields that are not known are refused by name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


class Item(BaseModel):
    """The same for what stands in a list of which `Few` checks all: a conversation has hundreds."""

    model_config = Wire.model_config


def check_sizes(values: Any) -> Any:
    """The values, if none has too many fields. Raises `ValueError`."""
    for value in values if isinstance(values, list) else ():
        _check_size(value)
    return values


Few = BeforeValidator(check_sizes)


class Offer(NamedTuple):
    """A verb under its path, and the model that describes what it gives."""

    method: str
    path: str
    verb: Verb
    summary: str
    gives: type[VendorAnswer]
    described: Described


class VendorEndpoint(Endpoint):
    """The offer's verb is called with what an endpoint's verb is, and the caller, and gives the
    same. An answer that exists at once waits as `wait` says. The API key is the Bearer token, or
    the header `x-api-key`."""

    def __init__(
        self,
        core: ServeCore,
        error_body: ErrorBody,
        offer: Offer,
        *,
        wait: Wait = Wait.DURABLE,
    ) -> None:
        super().__init__(
            offer.method,
            offer.path,
            lasting(offer.verb, core.sessions.journal, wait),
            offer.summary,
            access=Access.API_KEY,
            described=offer.described,
        )
        self.gives = offer.gives
        self._core = core
        self._error_body = error_body

    async def _answer(self, request: Request) -> Response:
        request_id = request_id_of(request)
        try:
            return await self._ask(request, request_id)
        except ParrotError as error:
            return self._failed(error, request_id)
        except ElsewhereError:
            raise
        except Exception:
            logger.exception("unhandled error on %s", self.path)
            return self._failed(InternalError("internal error"), request_id)

    async def _ask(self, request: Request, request_id: str) -> Response:
        tenant, span = self._core.tenant(api_key_of(request)), _span(request)
        if span is not None and (sampler := self._core.sessions.sampler) is not None:
            span = sampler.judged(span)
        key = idempotency_key_of(request)
        caller = Caller(tenant, _program(request), request_id, {}, str(span or ""), key)
        arguments = await self._arguments(request)
        result = self._verb(**arguments, caller=caller)
        if inspect.isawaitable(result):
            result = await run_until_disconnect(request, result)
        if isinstance(result, AsyncGenerator):
            response: Response = EventStream(result, lambda error: self._failed(error, request_id))
        else:
            response = self._response(result)
        response.headers.update(caller.headers)
        return response

    async def _read_fields(self, request: Request) -> Any:
        """The body's, or the query's where there is no body: clients put fields into the query of
        a POST that mean nothing here."""
        if self.method != "POST":
            return dict(request.query_params)
        return await read_json(request, check=require_shallow)

    def _failed(self, error: ParrotError, request_id: str) -> Response:
        status, body = self._error_body(error, request_id)
        return Response(
            orjson.dumps(body),
            status_code=status,
            media_type="application/json",
            headers=error_headers(error, status),
        )


def require_shallow(value: Any) -> None:
    """Raise `InvalidRequest` for JSON that is nested so deeply that it could not be written with
    something around it."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for part in inner for one in part if isinstance(one, dict | list)]
        if not level:
            return
    raise InvalidRequest("the JSON is nested too deeply")


def _span(request: Request) -> TraceParent | None:
    """The caller's."""
    given = request.headers.get("traceparent")
    return None if given is None else TraceParent.parse(given)


def _program(request: Request) -> str | None:
    names = (request.headers.get(name) for name in _PROGRAM_HEADERS)
    return next((name[:_MAX_NAME] for name in names if name), None)
