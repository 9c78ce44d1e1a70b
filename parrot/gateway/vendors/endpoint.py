"""Endpoints in a vendor's format: the caller of a request, and errors in the vendor's form."""

import inspect
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from fastapi import Request, Response
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SecretStr,
    model_validator,
)

from parrot.gateway.turns import Turn
from parrot.protocol.answers import EventStream, error_headers, request_id_of, run_until_disconnect
from parrot.protocol.endpoint import (
    Access,
    Described,
    Endpoint,
    api_key_of,
    headers_of,
    idempotency_key_of,
    read_json,
)
from parrot.protocol.errors import InternalError, InvalidRequest, ParrotError
from parrot.serve.core import ServeCore
from parrot.serve.durability import Wait, durable_errors, durable_verb
from parrot.utils.shard import ElsewhereError
from parrot.utils.traceparent import TraceParent

logger = logging.getLogger(__name__)

# Headers that name the program of a request; the first one that is set counts.
_PROGRAM_HEADERS = ("x-parrot-program", "x-session-affinity", "x-session-id", "session_id")
_MAX_NAME = 1024  # Characters of a program's name. The rest is cut off.
_PRODUCT = re.compile(r"[\w.-]+", re.ASCII)
_MAX_PRODUCT = 64  # Characters of a client's name. The rest is cut off.
_MAX_CLIENTS = 256  # Names of clients that are cached. More user agents are parsed again.
# The names of clients whose user agent has another name.
_CLIENTS = {
    "asyncopenai": "openai",
    "asyncanthropic": "anthropic",
    "claude-cli": "claude-code",
    "codex_cli_rs": "codex",
    "codex_exec": "codex",
    "mozilla": "browser",
}
_MAX_DEPTH = 246  # Nesting levels of a request's JSON. orjson writes at most 254 levels.

Verb = Callable[..., Any]
Prepare = Callable[..., Awaitable[Any]]
ErrorBody = Callable[[ParrotError, str], tuple[int, dict[str, Any]]]
"""Returns the status and the JSON of an error, from the error and the request's id."""


_MAX_FIELDS = 256  # Fields of one JSON object. Validating a million fields would take seconds.


class Caller(NamedTuple):
    """The client of a request."""

    tenant: str
    program: str | None  # the program's name in a header
    request_id: str
    headers: dict[str, str]  # of the answer; may be extended
    traceparent: str = ""  # the caller's span; empty: none
    key: SecretStr | None = None  # for servers that get the client's key
    idempotency_key: str | None = None  # a stored response with this key is created once
    client: str = ""  # name of the client's program, from its user agent; empty: unknown

    def report_prefix(self, turn: Turn) -> None:
        """Set the header that describes how much the turn's prompt shares with the previous one."""
        self.headers["x-parrot-prefix"] = turn.prefix


class VendorAnswer(BaseModel):
    """An answer in the vendor's format. It serves only the API description, and lists the main
    fields; the vendor documents the rest."""

    model_config = ConfigDict(extra="allow")


class Bounded(BaseModel):
    """Base of objects with arbitrary fields, at most `_MAX_FIELDS`."""

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
    """Base of objects that clients send. Unknown fields are rejected with their names."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


class Item(BaseModel):
    """Like `Wire`, for elements of a list whose sizes `Few` checks in one pass."""

    model_config = Wire.model_config


def check_sizes(values: Any) -> Any:
    """Returns the values if no object has too many fields. Raises `ValueError`."""
    for value in values if isinstance(values, list) else ():
        _check_size(value)
    return values


Few = BeforeValidator(check_sizes)


class Offer(NamedTuple):
    """A verb with its path, and the model that describes its answer. `prepare` is awaited before
    the verb, which receives its result as `prepared`."""

    method: str
    path: str
    verb: Verb
    summary: str
    gives: type[VendorAnswer]
    described: Described
    prepare: Prepare | None = None


class VendorEndpoint(Endpoint):
    """An endpoint whose verb also receives the `caller`. The verb returns bytes, an awaitable or
    events, as for `Endpoint`. An immediate answer waits for the journal as `wait` says. The API key
    is the Bearer token or the header `x-api-key`."""

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
            durable_verb(offer.verb, core.sessions.journal, wait),
            offer.summary,
            access=Access.API_KEY,
            described=offer.described,
        )
        self.gives = offer.gives
        self._core = core
        self._forwards_keys = any(one.forward_client_key for one in core.config.servers)
        self._error_body = error_body
        self._prepare = None
        if offer.prepare is not None:
            self._prepare = durable_errors(offer.prepare, core.sessions.journal)

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
        headers = headers_of(request)
        api_key = api_key_of(headers)
        tenant, span = self._core.tenant(api_key), None
        if (parent := headers.get("traceparent")) is not None:
            span = TraceParent.parse(parent)
        if span is not None and (sampler := self._core.sessions.sampler) is not None:
            span = sampler.judged(span)
        key = SecretStr(api_key) if self._forwards_keys and api_key else None
        once = idempotency_key_of(headers)
        program, client = _program(headers), client_name(headers.get("user-agent", ""))
        caller = Caller(tenant, program, request_id, {}, str(span or ""), key, once, client)
        arguments = await self._arguments(request)
        if self._prepare is not None:
            arguments["prepared"] = await self._prepare(**arguments, caller=caller)
        result = self._verb(**arguments, caller=caller)
        is_stream = isinstance(result, AsyncGenerator)
        if not is_stream and inspect.isawaitable(result):
            result = await run_until_disconnect(request, result)
            is_stream = isinstance(result, AsyncGenerator)
        if is_stream:
            return EventStream(
                result, lambda error: self._failed(error, request_id), caller.headers
            )
        response = self._response(result)
        response.headers.update(caller.headers)
        return response

    async def _read_fields(self, request: Request) -> Any:
        """The body's fields, or the query's if the method has no body. The query of a POST is
        ignored, because clients put meaningless fields there."""
        if self.method != "POST":
            return dict(request.query_params)
        return await read_json(request, check=require_shallow)

    def _failed(self, error: ParrotError, request_id: str) -> Response:
        status, body = self._error_body(error, request_id)
        return Response(
            orjson.dumps(body),
            status_code=status,
            media_type="application/json",
            headers=error_headers(error, status, is_new_call=True),
        )


def require_shallow(value: Any) -> None:
    """Raise `InvalidRequest` if the JSON is nested more deeply than `_MAX_DEPTH`."""
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        outer, level = level, []
        for one in outer:
            for inner in one.values() if isinstance(one, dict) else one:
                if isinstance(inner, dict | list):
                    level.append(inner)
        if not level:
            return
    raise InvalidRequest("the JSON is nested too deeply")


@lru_cache(_MAX_CLIENTS)
def client_name(user_agent: str) -> str:
    """The name of the program in a user agent: its first product, without the version. Empty if
    there is none."""
    found = _PRODUCT.match(user_agent[:_MAX_PRODUCT])
    name = "" if found is None else found[0].lower()
    return _CLIENTS.get(name, name)


def _program(headers: Mapping[str, str]) -> str | None:
    for name in _PROGRAM_HEADERS:
        if given := headers.get(name):
            return given[:_MAX_NAME]
    return None
