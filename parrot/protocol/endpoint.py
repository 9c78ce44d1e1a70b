"""Endpoints: the verbs of a server, each under a method and a path, with a rule who may use it. A
request becomes the arguments of its verb here: its head and its body, read within bounds, as strict
JSON."""

import asyncio
import inspect
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from enum import StrEnum
from typing import Any, NamedTuple, Self, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from parrot.protocol.answers import (
    JSON,
    Check,
    EventStream,
    JsonResponse,
    has_long_list,
    json_bytes,
    json_in_turns,
    run_until_disconnect,
)
from parrot.protocol.bodies import SMALL, BodyBudget, JsonMeter
from parrot.protocol.errors import (
    AuthenticationFailed,
    Cancelled,
    InvalidRequest,
    PayloadTooLarge,
    UnsupportedMediaType,
    ValidationFailed,
)
from parrot.protocol.fields import Id, Label, Path
from parrot.utils.ids import tokens_equal
from parrot.utils.traceparent import TraceParent

_BEARERS = ("session_auth", "api_key")  # fields for which a Bearer token may stand
_LARGE = 2**17  # bytes of a body
_MAX_FIELDS = 64
_MAX_KEY = 256  # characters of a client's for a request
LARGE = 2**20
T = TypeVar("T", bound=BaseModel)


Verb = Callable[..., Any]
Handler = Callable[[Request], Awaitable[Response]]
Wrapper = Callable[[Request, Handler], Awaitable[Response]]
"""Answers a request in the place of the handler, which it may ask."""

Step = Callable[[Request, dict[str, Any]], None]
"""May add to the arguments of a request's verb, or refuse the request."""


class Access(StrEnum):
    """The thing that a request must present, where the server has it: without API keys nobody is
    asked for one, without a cluster token nobody for that, and without both nobody for a cookie."""

    ANYBODY = "nothing"
    API_KEY = "an API key"
    SESSION = "the session's `session_auth`"
    SESSION_OR_KEY = "the session's `session_auth`, or an API key"
    CLUSTER = "the cluster token"
    METRICS = "the cluster token, or an API key with the scope `metrics`"
    ADMIN = "the cluster token, or an API key with the scope `admin`"
    VISITOR = "the page's cookie"


class Rule(NamedTuple):
    """`method`: "*" is every one."""

    method: str
    path: str
    access: Access


class RuledRoute(Route):
    """`endpoint`: what answers a request, or an ASGI app."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        access: Access,
        methods: Sequence[str] = ("GET",),
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.access = access


class RuledMount(Mount):
    def __init__(self, path: str, app: Any, access: Access) -> None:
        super().__init__(path, app)
        self.access = access


def rules(routes: Iterable[BaseRoute]) -> Iterator[Rule]:
    """Yield the rules of all methods of all routes. Raises `TypeError` for a route without one."""
    for route in routes:
        if isinstance(route, RuledMount):
            yield Rule("*", f"{route.path}/", route.access)
        elif isinstance(route, RuledRoute):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield Rule(method, route.path, route.access)
        else:
            raise TypeError(f"{route} has no access rule")


class BodyRules(NamedTuple):
    """The bodies that a route takes. `max_size`: bytes of a body, if less than the server's limit.
    `admits`: whether a body of more than 1 MiB is read, as the request's head tells. `is_metered`:
    what its JSON is made of is bounded (see bodies.py)."""

    max_size: int | None = None
    admits: Callable[[Request], bool] | None = None
    is_metered: bool = True

    def check(self, request: Request, size: int) -> None:
        """Raise `PayloadTooLarge` or `AuthenticationFailed` if a body of this size is not read."""
        if self.max_size is not None and size > self.max_size:
            raise PayloadTooLarge(f"the request body exceeds {self.max_size} bytes")
        if size > LARGE and self.admits is not None and not self.admits(request):
            raise AuthenticationFailed(
                f"a body of more than {LARGE} bytes needs the key or `session_auth` as a header, "
                "`Authorization: Bearer`"
            )


ANY_BODY = BodyRules()
PEER_BODY = BodyRules(is_metered=False)
SMALL_BODY = BodyRules(SMALL)


class PathParameters(BaseModel):
    """The names that may stand in the braces of a path."""

    session_id: Id = 0
    request_id: Id = 0
    var_id: Label = ""
    model_id: Path = ""
    engine_id: Id = 0
    response_id: Label = ""


def taking(model: type[BaseModel], verb: Verb) -> Verb:
    """The verb, which has a parameter for each field of the model, as one that takes a request."""

    def taking_verb(request: BaseModel, **path: Any) -> Any:
        return verb(**dict(request), **path)

    request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=model)
    gives = inspect.signature(verb).return_annotation
    signature = inspect.Signature([request], return_annotation=gives)
    taking_verb.__signature__ = signature  # type: ignore[attr-defined]
    return taking_verb


class Described(NamedTuple):
    """The description of an endpoint's answers. It changes nothing of them, but that `media_type`
    is the type of bytes."""

    errors: tuple[int, ...] = ()  # statuses that it may fail with, besides 400, 415 and 422
    about: str = "OK"
    media_type: str = JSON
    may_stream: bool = False  # it gives server-sent events to those who ask for them


_OK = Described()


class Endpoint:
    """One verb of a server, as an ASGI app for a route.

    `verb` is called with the request (the model that annotates its parameter `request`) and with
    those parameters of the path that are no fields of that. It gives a model, None (for `{}`),
    bytes, or server-sent events; an awaitable of one is cancelled when the client goes away.

    The fields are those of the JSON body, over the query's, for any method. A Bearer token stands
    for the field `session_auth`, or `api_key` where there is none, if it is not given, and the
    headers `traceparent` and `Idempotency-Key` for those fields.
    `access` says who may use it, and `body` which bodies are read."""

    def __init__(
        self,
        method: str,
        path: str,
        verb: Verb,
        summary: str = "",
        *,
        access: Access,
        body: BodyRules = ANY_BODY,
        described: Described = _OK,
    ) -> None:
        signature = inspect.signature(verb)
        request = signature.parameters.get("request")
        self.method = method
        self.path = path
        self.summary = summary
        self.takes: type[BaseModel] | None = None if request is None else request.annotation
        self.gives = signature.return_annotation
        self.access = access
        self.described = described
        self._verb = verb
        fields = {} if self.takes is None else self.takes.model_fields
        self._bearer = next((name for name in _BEARERS if name in fields), None)
        self._is_traced = "traceparent" in fields
        self._is_repeatable = "idempotency_key" in fields
        self._body = body
        self._steps: tuple[Step, ...] = ()
        self._handle: Handler = self._answer

    def checked(self, check: Check) -> Self:
        """The endpoint, for requests that `check` lets pass: it is asked before one is read, and
        what it gives is the request's `state.who`, for what is wrapped around."""

        async def answer(request: Request, endpoint: Handler) -> Response:
            request.state.who = check(request)
            return await endpoint(request)

        return self.wrapped(answer)

    def wrapped(self, wrapper: Wrapper) -> Self:
        """The endpoint, with `wrapper` around it, outside of those that it has already."""
        inner = self._handle
        self._handle = lambda request: wrapper(request, inner)
        return self

    def stepping(self, step: Step) -> Self:
        """The endpoint, with `step` between a request and the verb: it is called with the arguments
        that were read, behind the steps that it has already."""
        self._steps = (*self._steps, step)
        return self

    def route(self) -> "RuledRoute":
        """A plain route: FastAPI's, which resolve dependencies, cost more than all of ServeCore's
        own work on a call."""
        route = RuledRoute(self.path, self, self.access, methods=[self.method])
        if self.takes is not None:
            route.methods = {self.method}  # without HEAD, which would be a read
        return route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handle(Request(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        result = self._verb(**await self._arguments(request))
        if inspect.isawaitable(result):
            result = await run_until_disconnect(request, result)
        if isinstance(result, BaseModel) and has_long_list(result):
            result = await json_in_turns(result)
        return self._response(result)

    async def _arguments(self, request: Request) -> dict[str, Any]:
        """The arguments that the verb is called with."""
        arguments: dict[str, Any] = {}
        if request.path_params:
            path = parse_payload(PathParameters, request.path_params)
            arguments = {name: getattr(path, name) for name in request.path_params}
        if self.takes is not None:
            fields = await self._read_fields(request)
            for name in arguments.keys() & self.takes.model_fields:
                value = arguments.pop(name)
                if isinstance(fields, dict):
                    fields[name] = value
            arguments["request"] = parse_payload(self.takes, fields)
            if declared_size(request) > _LARGE:
                await asyncio.sleep(0)
        for step in self._steps:
            step(request, arguments)
        return arguments

    async def _read_fields(self, request: Request) -> Any:
        fields = await read_json(request, self._body)
        if not isinstance(fields, dict):
            return fields  # validation says what is wrong with it
        if request.scope["query_string"]:
            fields = dict(request.query_params) | fields
        bearer = self._bearer
        if bearer is not None and fields.get(bearer) is None:
            fields |= {} if (token := bearer_token(request)) is None else {bearer: token}
        if self._is_traced and fields.get("traceparent") is None:
            given = request.headers.get("traceparent")
            if given is not None and TraceParent.parse(given) is not None:
                fields["traceparent"] = given
        if self._is_repeatable and fields.get("idempotency_key") is None:
            fields["idempotency_key"] = idempotency_key_of(request)
        return fields

    def _response(self, result: object) -> Response:
        if isinstance(result, BaseModel):
            return JsonResponse(json_bytes(result))
        if result is None:
            return JsonResponse(b"{}")
        if isinstance(result, bytes):
            return Response(result, media_type=self.described.media_type)
        assert isinstance(result, AsyncIterator), result
        return EventStream(result)


def declared_size(request: Request) -> int:
    """Bytes of the body; 0 if nothing is said."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


async def read_body(request: Request, rules: BodyRules = ANY_BODY) -> bytes:
    """The whole body, which the request does not keep. Raises what the rules and the meter raise,
    `Unavailable` when the bodies of all requests become too large, and `Cancelled` if the client
    leaves or is too slow."""
    if (declared := declared_size(request)) > 0:
        rules.check(request, declared)
    message = await request.receive()
    is_whole = message["type"] == "http.request" and not message.get("more_body", False)
    if is_whole and len(body := message["body"]) <= min(declared, SMALL):
        return bytes(body)  # as nearly all are: small, and there at once
    budget: BodyBudget = request.app.state.body_budget
    with budget.lease() as lease:
        chunks, size = [], 0
        meter: JsonMeter | None = None
        while True:
            if message["type"] == "http.disconnect":
                raise Cancelled("the client disconnected")
            if chunk := message.get("body", b""):
                chunks.append(chunk)
                size += len(chunk)
                rules.check(request, size)
            if size > SMALL:
                lease.hold(size)
                if rules.is_metered:
                    for piece in chunks if meter is None else (chunk,):
                        meter = meter or JsonMeter()
                        meter.feed(piece)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)
            message = await request.receive()


async def read_json(
    request: Request, rules: BodyRules = ANY_BODY, check: Callable[[Any], None] | None = None
) -> Any:
    """The request's JSON body, {} when it is empty. orjson refuses NaN, lone surrogates and deep
    nesting, so nothing behind this line meets them; nor what `check` raises for. Each pass over a
    large body takes some ten milliseconds, so other requests may run between two passes.

    A page of another site can make a browser send any body but one that is declared as JSON, for
    which the browser asks first."""
    raw = await read_body(request, rules)
    if not raw:
        return {}
    declared = request.headers.get("content-type", "")
    if declared.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaType(f"the body must be declared as {JSON}, not {declared!r:.80}")
    is_large = len(raw) > _LARGE
    if is_large:
        await asyncio.sleep(0)
    try:
        payload = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if isinstance(payload, dict) and len(payload) > _MAX_FIELDS:
        # Before validation, which would say of each that it is unknown.
        raise InvalidRequest(f"the body has more than {_MAX_FIELDS} fields")
    if check is not None:
        if is_large:
            await asyncio.sleep(0)
        check(payload)
    if is_large:
        await asyncio.sleep(0)
    return payload


def parse_payload(model: type[T], payload: Any) -> T:
    """Validate `payload`, or raise `ValidationFailed` that names the first bad field."""
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        param = ".".join(map(str, first["loc"]))
        where = f"`{param}`: " if param else ""
        more = f" (and {len(others)} more)" if others else ""
        raise ValidationFailed(f"{where}{first['msg']}{more}", param=param or None) from None


def bearer_token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else None


def api_key_of(request: Request) -> str | None:
    """The Bearer token, or the header `x-api-key` (Anthropic's)."""
    return bearer_token(request) or request.headers.get("x-api-key")


def idempotency_key_of(request: Request) -> str | None:
    """The header `Idempotency-Key`. Raises `InvalidRequest` for one that is too long."""
    key = request.headers.get("idempotency-key")
    if key is not None and len(key) > _MAX_KEY:
        text = f"`Idempotency-Key` has more than {_MAX_KEY} characters"
        raise InvalidRequest(text, param="Idempotency-Key")
    return key or None


def knows_cluster_token(request: Request, expected: str | None) -> bool:
    """Whether it carries the cluster's token, or none is configured."""
    return expected is None or tokens_equal(bearer_token(request) or "", expected)


def require_cluster_token(request: Request, expected: str | None) -> None:
    """Raises `AuthenticationFailed`."""
    if not knows_cluster_token(request, expected):
        raise AuthenticationFailed("missing or wrong cluster token (`Authorization: Bearer TOKEN`)")
