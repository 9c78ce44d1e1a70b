"""Endpoints: the functions ("verbs") of a server, each with a method, a path and an access rule.
This module turns a request into the arguments of its verb. The body is size-limited strict JSON."""

import asyncio
import inspect
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
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

_BEARERS = ("session_auth", "api_key")  # Fields that a Bearer token can replace.
_LARGE = 2**17  # Bytes of a body above which other tasks may run between parsing steps.
_MAX_FIELDS = 64  # Fields of a body's JSON object.
_MAX_KEY = 256  # Characters of an idempotency key.
LARGE = 2**20  # Bytes of a body above which the head must authenticate the request.
T = TypeVar("T", bound=BaseModel)


Verb = Callable[..., Any]
Handler = Callable[[Request], Awaitable[Response]]
Wrapper = Callable[[Request, Handler], Awaitable[Response]]
"""Answers a request and may call the wrapped handler for this."""

Step = Callable[[Request, dict[str, Any]], None]
"""May change the arguments of a request's verb, or reject the request."""


class Access(StrEnum):
    """The credential of a request. It is only required if the server is configured with it: API
    keys, a cluster token, or for the page's cookie either of them."""

    ANYBODY = "nothing"
    API_KEY = "an API key"
    SESSION = "the session's `session_auth`"
    SESSION_OR_KEY = "the session's `session_auth`, or an API key"
    CLUSTER = "the cluster token"
    METRICS = "the cluster token, or an API key with the scope `metrics`"
    ADMIN = "the cluster token, or an API key with the scope `admin`"
    VISITOR = "the page's cookie"


class Rule(NamedTuple):
    """The access rule of a method and a path. `method` "*": all methods."""

    method: str
    path: str
    access: Access


class RuledRoute(Route):
    """A route with an access rule. `endpoint`: a request handler or an ASGI app."""

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
    """Yield the rules of all methods of all routes. Raises `TypeError` for a route without rule."""
    for route in routes:
        if isinstance(route, RuledMount):
            yield Rule("*", f"{route.path}/", route.access)
        elif isinstance(route, RuledRoute):
            for method in sorted((route.methods or set()) - {"HEAD"}):
                yield Rule(method, route.path, route.access)
        else:
            raise TypeError(f"{route} has no access rule")


class BodyRules(NamedTuple):
    """Limits for the bodies of a route."""

    max_size: int | None = None  # Bytes. None: the server's limit.
    # Decides from the request's head whether a body above 1 MiB is read.
    admits: Callable[[Request], bool] | None = None
    is_metered: bool = True  # The number of JSON values is limited, see bodies.py.

    def check(self, request: Request, size: int) -> None:
        """Raises `PayloadTooLarge` or `AuthenticationFailed` if a body of this size is rejected."""
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
    """All parameters that a path can have, with their types."""

    session_id: Id = 0
    request_id: Id = 0
    var_id: Label = ""
    model_id: Path = ""
    engine_id: Id = 0
    response_id: Label = ""


def taking(model: type[BaseModel], verb: Verb) -> Verb:
    """Wrap a verb that has a parameter for each field of `model`. The result has the parameter
    `request` instead."""

    def taking_verb(request: BaseModel, **path: Any) -> Any:
        return verb(**dict(request), **path)

    request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=model)
    gives = inspect.signature(verb).return_annotation
    signature = inspect.Signature([request], return_annotation=gives)
    taking_verb.__signature__ = signature  # type: ignore[attr-defined]
    return taking_verb


class Described(NamedTuple):
    """The description of an endpoint's responses for OpenAPI."""

    errors: tuple[int, ...] = ()  # Statuses of errors, besides 400, 415 and 422.
    about: str = "OK"
    media_type: str = JSON  # Also the media type of responses that are bytes.
    may_stream: bool = False  # The endpoint sends server-sent events if a request asks for them.


_OK = Described()


class Endpoint:
    """One verb of a server, as an ASGI app for a route.

    `verb` receives `request`, an instance of the model that annotates this parameter, and the path
    parameters that are not fields of the model. It returns a model, None (for `{}`), bytes, or
    server-sent events. If it returns an awaitable, a client that disconnects cancels it.

    The model's fields come from the JSON body, then from the query. Headers replace missing fields:
    a Bearer token `session_auth` (or `api_key`), `traceparent` and `Idempotency-Key`."""

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
        """Call `check` before a request is read. Its result becomes the request's `state.who`.
        Returns the endpoint."""

        async def answer(request: Request, endpoint: Handler) -> Response:
            request.state.who = check(request)
            return await endpoint(request)

        return self.wrapped(answer)

    def wrapped(self, wrapper: Wrapper) -> Self:
        """Add `wrapper` outside all present wrappers. Returns the endpoint."""
        inner = self._handle
        self._handle = lambda request: wrapper(request, inner)
        return self

    def stepping(self, step: Step) -> Self:
        """Add a step that receives the verb's arguments before the verb, after all present steps.
        Returns the endpoint."""
        self._steps = (*self._steps, step)
        return self

    def route(self) -> "RuledRoute":
        """A plain route. FastAPI's routes, which resolve dependencies, take more time than all work
        of ServeCore for a call."""
        route = RuledRoute(self.path, self, self.access, methods=[self.method])
        if self.takes is not None:
            route.methods = {self.method}  # Without HEAD, which would start a read.
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
        """The arguments of the verb."""
        arguments: dict[str, Any] = {}
        if request.path_params:
            path = parse_payload(PathParameters, request.path_params)
            arguments = {name: getattr(path, name) for name in request.path_params}
        if self.takes is not None:
            fields = await self._read_fields(request)
            for name in self.takes.model_fields.keys() & arguments.keys():
                value = arguments.pop(name)
                if isinstance(fields, dict):
                    fields[name] = value
            arguments["request"] = parse_payload(self.takes, fields)
            if declared_size(request) > _LARGE:
                await asyncio.sleep(0)
        elif self.method == "POST":
            await read_json(request, self._body)  # Only its checks are needed.
        for step in self._steps:
            step(request, arguments)
        return arguments

    async def _read_fields(self, request: Request) -> Any:
        fields = await read_json(request, self._body)
        if not isinstance(fields, dict):
            return fields  # Validation reports the error.
        if request.scope["query_string"]:
            fields = dict(request.query_params) | fields
        bearer, headers = self._bearer, headers_of(request)
        if bearer is not None and fields.get(bearer) is None:
            fields |= {} if (token := bearer_token(headers)) is None else {bearer: token}
        if self._is_traced and fields.get("traceparent") is None:
            given = headers.get("traceparent")
            if given is not None and TraceParent.parse(given) is not None:
                fields["traceparent"] = given
        if self._is_repeatable and fields.get("idempotency_key") is None:
            fields["idempotency_key"] = idempotency_key_of(headers)
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
    """The `Content-Length` in bytes, or 0 without one."""
    declared = headers_of(request).get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


def headers_of(request: Request) -> Mapping[str, str]:
    """The first value of each header, by its name in lower case. The request keeps the dict.
    Starlette's `Headers` would search a list for each name."""
    scope = request.scope
    if "parrot_headers" not in scope:
        scope["parrot_headers"] = found = {}
        for name, value in reversed(scope["headers"]):
            found[name.decode("latin-1")] = value.decode("latin-1")
    headers: Mapping[str, str] = scope["parrot_headers"]
    return headers


async def read_body(request: Request, rules: BodyRules = ANY_BODY) -> bytes:
    """The whole body. The request does not keep it. Raises the errors of `rules` and `JsonMeter`,
    `Unavailable` if all bodies together exceed the budget, and `Cancelled` if the client
    disconnects or is too slow."""
    if (declared := declared_size(request)) > 0:
        rules.check(request, declared)
    message = await request.receive()
    is_whole = message["type"] == "http.request" and not message.get("more_body", False)
    if is_whole and len(body := message["body"]) <= min(declared, SMALL):
        return bytes(body)  # Nearly all bodies are small and arrive as one message.
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
    """The request's JSON body, or {} if it is empty. orjson rejects NaN, lone surrogates and deep
    nesting, and `check` may reject more. Each pass over a large body takes about 10 ms, so other
    requests may run between two passes.

    The content type must be JSON. An empty body needs no type, except from a browser, which sends
    `Origin` with each POST. A page of another site can make a browser send any other type. Before
    it sends JSON, the browser asks the server for permission (CORS)."""
    raw = await read_body(request, rules)
    if not raw and "origin" not in headers_of(request):
        return {}
    declared = headers_of(request).get("content-type", "")
    if declared.partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaType(f"the body must be declared as {JSON}, not {declared!r:.80}")
    if not raw:
        return {}
    is_large = len(raw) > _LARGE
    if is_large:
        await asyncio.sleep(0)
    try:
        payload = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if isinstance(payload, dict) and len(payload) > _MAX_FIELDS:
        # Check before validation, whose error would list each unknown field.
        raise InvalidRequest(f"the body has more than {_MAX_FIELDS} fields")
    if check is not None:
        if is_large:
            await asyncio.sleep(0)
        check(payload)
    if is_large:
        await asyncio.sleep(0)
    return payload


def parse_payload(model: type[T], payload: Any) -> T:
    """Validate `payload`. Raises `ValidationFailed` with the name of the first invalid field."""
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        param = ".".join(map(str, first["loc"]))
        where = f"`{param}`: " if param else ""
        more = f" (and {len(others)} more)" if others else ""
        raise ValidationFailed(f"{where}{first['msg']}{more}", param=param or None) from None


def bearer_token(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else None


def api_key_of(headers: Mapping[str, str]) -> str | None:
    """The Bearer token, or the header `x-api-key` (Anthropic's)."""
    return bearer_token(headers) or headers.get("x-api-key")


def idempotency_key_of(headers: Mapping[str, str]) -> str | None:
    """The header `Idempotency-Key`. Raises `InvalidRequest` above 256 characters."""
    key = headers.get("idempotency-key")
    if key is not None and len(key) > _MAX_KEY:
        text = f"`Idempotency-Key` has more than {_MAX_KEY} characters"
        raise InvalidRequest(text, param="Idempotency-Key")
    return key or None


def knows_cluster_token(request: Request, expected: str | None) -> bool:
    """Whether the request has the cluster token, or no token is configured."""
    return expected is None or tokens_equal(bearer_token(headers_of(request)) or "", expected)


def require_cluster_token(request: Request, expected: str | None) -> None:
    """Raises `AuthenticationFailed` if the request lacks the cluster token."""
    if not knows_cluster_token(request, expected):
        raise AuthenticationFailed("missing or wrong cluster token (`Authorization: Bearer TOKEN`)")
