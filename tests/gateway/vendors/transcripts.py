"""Transcripts: the requests of clients and the shapes of answers, in a form that can be replayed.

Long texts are stored as their lengths, because their contents do not matter. The arguments of calls
are stored as they are. Ids from the server are stored as their positions in the order of
answers."""

import json
import re
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.gateway.vendors.scripted import KEY

Json = dict[str, Any]

_KEPT_HEADERS = ("anthropic-version", "anthropic-beta", "accept", "content-type", "user-agent")
_MAX_KEPT = 64  # characters
_GIVEN_ID = re.compile(r"resp_[\w-]+")


class GivenIds:
    """The ids of responses that the server gave."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    def note(self, answer: str) -> None:
        self._ids += [
            id_ for id_ in dict.fromkeys(_GIVEN_ID.findall(answer)) if id_ not in self._ids
        ]

    def as_places(self, text: str) -> str:
        for i, id_ in enumerate(self._ids):
            text = text.replace(id_, f"<given {i}>")
        return text

    def as_ids(self, text: str) -> str:
        for i, id_ in enumerate(self._ids):
            text = text.replace(f"<given {i}>", id_)
        return text


class Recorder:
    """A middleware that records requests and the shapes of answers. `is_gone` means that the client
    disconnected before the end. `feature` is the tested feature."""

    def __init__(self, app: ASGIApp) -> None:
        self.requests: list[Json] = []
        self.feature = ""
        self._app = app
        self._ids = GivenIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = dict(scope.get("headers", ())).get(b"x-feature")
        if said is not None or scope["type"] != "http":
            self.feature = (said or b"").decode() or self.feature
            await self._app(scope, receive, send)
            return
        request = self._begin(scope)
        body, answer = bytearray(), bytearray()
        has_ended = False

        async def received() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.disconnect" and not has_ended:
                request["is_gone"] = True
            return message

        async def sent(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                request["status"] = message["status"]
            else:
                answer.extend(message["body"])
                has_ended = not message.get("more_body", False)
            await send(message)

        await self._app(scope, received, sent)
        if body:
            request["body"] = shortened(json.loads(self._ids.as_places(body.decode())))
        if request["is_gone"]:
            del request["status"]
        else:
            request["answer"] = None if scope["method"] == "HEAD" else shape_of(answer.decode())
        self._ids.note(answer.decode())

    def _begin(self, scope: Scope) -> Json:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        request: Json = {
            "feature": self.feature,
            "method": scope["method"],
            "path": self._ids.as_places(scope["path"] + (f"?{query}" if query else "")),
            "headers": {name: headers[name] for name in _KEPT_HEADERS if name in headers},
            "is_key_right": KEY
            in (headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key")),
            "is_gone": False,
            "status": None,
        }
        self.requests.append(request)
        return request


def shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item if key == "arguments" else shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, str) and len(value) > _MAX_KEPT:
        return {"$characters": len(value)}
    return value


def lengthened(value: Any) -> Any:
    """Invert `shortened`, with placeholders for the texts."""
    match value:
        case {"$characters": int(length)}:
            return "x" * length
        case dict():
            return {key: lengthened(item) for key, item in value.items()}
        case list():
            return [lengthened(item) for item in value]
    return value


def shape_of(answer: str) -> Any:
    """Return the fields of a JSON answer, or of each kind of event of a stream. None for plain
    text."""
    if not answer.startswith(("event:", "data:", ":")):
        return _fields(json.loads(answer)) if answer[:1] in ("{", "[") else None
    kinds: list[Any] = []
    for block in answer.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if "data" in lines:
            data = lines["data"]
            kind = {"event": lines.get("event")}
            kind["data"] = data if data == "[DONE]" else _fields(json.loads(data))
            if kind not in kinds:
                kinds.append(kind)
    return kinds


def lacks(found: Any, wanted: Any) -> list[str]:
    """Return the parts of a recorded shape that are missing in the new one."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        missing = [f"`{key}`" for key in wanted if key not in found]
        inner = [(key, found[key], wanted[key]) for key in wanted if key in found]
        return missing + [f"{key}: {lack}" for key, f, w in inner for lack in lacks(f, w)]
    if isinstance(wanted, list):
        return [str(want) for want in wanted if all(lacks(one, want) for one in _items(found))]
    return [] if found == wanted else [f"{found} instead of {wanted}"]


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _fields(value: Any) -> Any:
    """Return the names and types of fields. A list has one entry for each kind of item."""
    if isinstance(value, dict):
        return {key: _fields(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds: list[Any] = []
        for item in map(_fields, value):
            if item not in kinds:
                kinds.append(item)
        return kinds
    return type(value).__name__
