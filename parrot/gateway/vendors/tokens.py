"""`POST /tokenize` and `/detokenize`, in vLLM's format, and `POST /v1/embeddings`, in OpenAI's."""

import asyncio
from base64 import b64decode
from collections.abc import Sequence
from struct import unpack
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Discriminator, Field, Tag

from parrot.gateway.direct import DirectRequests
from parrot.gateway.turns import Turns, unknown_field
from parrot.gateway.vendors.chat_completions import MAX_MESSAGES, ChatMessage, template_messages
from parrot.gateway.vendors.endpoint import Caller, VendorAnswer, Wire
from parrot.gateway.vendors.openai_fields import Ignored, Refused
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.protocol.fields import MAX_TOKENS, Name, Text, TokenIds
from parrot.serve.core import ServeCore

MAX_INPUTS = 2048  # OpenAI's limit of inputs per request.
_TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
_Ids = Annotated[list[_TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]
_Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
_Lists = Annotated[list[_Ids], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


class TokenizeRequest(Wire):
    """Has either `prompt` or `messages`."""

    model: Name
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(
        None, fail_fast=True, min_length=1, max_length=MAX_MESSAGES
    )


class DetokenizeRequest(Wire):
    model: Name
    tokens: TokenIds


class Tokens(VendorAnswer):
    count: int
    max_model_len: int | None
    tokens: list[int]


class DetokenizedText(VendorAnswer):
    prompt: str


class Tokenize:
    def __init__(self, core: ServeCore, turns: Turns) -> None:
        self._core = core
        self._turns = turns

    async def tokenize(self, request: TokenizeRequest, caller: Caller) -> bytes:
        """The token ids of a prompt or of chat messages, as the completion APIs encode them."""
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either a `prompt` or `messages`", param="prompt")
        prompt: Any = request.prompt
        if request.messages is not None:
            refused = Refused()
            prompt = template_messages(request.messages, refused)
            for error in refused:
                raise error
        ids = await self._turns.tokens(request.model, prompt, {})
        await asyncio.sleep(0)  # Millions of ids take long: let other tasks run first.
        longest = {card.id: card.max_model_len for card in self._core.models().data}
        return orjson.dumps(
            {"count": len(ids), "max_model_len": longest.get(request.model), "tokens": ids}
        )

    async def detokenize(self, request: DetokenizeRequest, caller: Caller) -> bytes:
        text = await self._turns.text(request.model, request.tokens)
        return orjson.dumps({"prompt": text})


def _kind(value: Any) -> str:
    """The kind of all items, from the first item, so that pydantic validates only that kind."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, list):
        return "lists"
    if isinstance(first, int):
        return "ids"
    return "text" if isinstance(value, str) else "texts"


class EmbeddingRequest(Wire):
    """Unknown fields are kept for the servers behind engines."""

    model_config = ConfigDict(extra="allow")

    model: Name
    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[_Texts, Tag("texts")]
        | Annotated[_Ids, Tag("ids")]
        | Annotated[_Lists, Tag("lists")],
        Discriminator(_kind),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=2**20)
    # It does not affect the answer.
    user: Ignored = None


class Embedding(VendorAnswer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(VendorAnswer):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: dict[str, int]


class EmbeddingsApi:
    def __init__(self, direct: DirectRequests) -> None:
        self._direct = direct

    async def create(self, request: EmbeddingRequest, caller: Caller) -> bytes:
        """Vectors of length 1, in the order of the inputs."""
        extra = self._extra(request)
        given: Any = request.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        embeddings, num_tokens = await self._direct.embed(
            caller.tenant,
            request.model,
            given,
            caller.traceparent,
            caller.request_id,
            caller.key,
            extra,
        )
        return await _written(request, embeddings, num_tokens)

    def _extra(self, request: EmbeddingRequest) -> dict[str, Any]:
        """The fields for the servers behind engines. Raises `UnsupportedField` and
        `ValidationFailed` for fields that affect the answer, if the model has other engines."""
        extra = {**(request.model_extra or {}), "dimensions": request.dimensions}
        extra = {name: value for name, value in extra.items() if value is not None}
        is_forwarded = self._direct.takes_extra(request.model)
        if request.dimensions is not None and not is_forwarded:
            text = "`dimensions` is not supported: the model fixes the size of its embeddings"
            raise UnsupportedField(text, param="dimensions")
        if not is_forwarded:
            for name in extra:
                raise unknown_field(name)
            return {}
        return extra if request.user is None else {**extra, "user": request.user}


async def _written(request: EmbeddingRequest, embeddings: Sequence[str], num_tokens: int) -> bytes:
    """The answer as JSON, serialized in steps, because it may contain millions of numbers."""
    pieces = []
    for index, embedding in enumerate(embeddings):
        value: str | tuple[float, ...] = embedding
        if request.encoding_format == "float":
            raw = b64decode(embedding)
            value = unpack(f"<{len(raw) // 4}f", raw)
        item = {"object": "embedding", "index": index, "embedding": value}
        pieces.append(orjson.dumps(item))
        await asyncio.sleep(0)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    frame = orjson.dumps({"object": "list", "model": request.model, "usage": usage})
    return frame[:-1] + b',"data":[' + b",".join(pieces) + b"]}"
