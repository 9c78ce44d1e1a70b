"""`POST /v1/embeddings`, in OpenAI's format."""

import asyncio
from base64 import b64decode
from collections.abc import Sequence
from struct import unpack
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag

from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.protocol.public import MAX_TEXT
from parrot.serve.api.vendors.endpoint import Caller, VendorAnswer
from parrot.serve.api.vendors.openai_common import Ignored, Wire
from parrot.serve.core import ServeCore
from parrot.serve.execution.embedder import Embedder, Input

MAX_INPUTS = 2048  # OpenAI's

_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
_Ids = Annotated[list[_TokenId], Field(fail_fast=True, max_length=MAX_TEXT)]
_Texts = Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
_Lists = Annotated[list[_Ids], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]


def _kind(value: Any) -> str:
    """All items are taken to be as the first is, so that a long list is looked at once."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, list):
        return "lists"
    if isinstance(first, int):
        return "ids"
    return "text" if isinstance(value, str) else "texts"


class EmbeddingRequest(Wire):
    model: str = Field(min_length=1, max_length=256)
    input: Annotated[
        Annotated[_Text, Tag("text")]
        | Annotated[_Texts, Tag("texts")]
        | Annotated[_Ids, Tag("ids")]
        | Annotated[_Lists, Tag("lists")],
        Discriminator(_kind),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    # Nothing in the answer depends on it.
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


class Embeddings:
    def __init__(self, core: ServeCore) -> None:
        self._core = core
        limit = core.config.global_scheduler.max_queue_size
        self._embedder = Embedder(core.fleet, core.require_room, limit)

    async def create(self, request: EmbeddingRequest, caller: Caller) -> bytes:
        """Vectors of length 1, in the order of the inputs."""
        if request.dimensions is not None:
            raise UnsupportedField("embeddings have no other `dimensions`", param="dimensions")
        model = self._core.config.model_aliases.get(request.model, request.model)
        inputs = await self._inputs(model, request.input)
        embeddings, num_tokens = await self._embedder.embed(
            caller.tenant, model, inputs, caller.traceparent
        )
        return await _written(request, embeddings, num_tokens)

    async def _inputs(self, model: str, given: Any) -> list[Input]:
        """Each text as its tokens, unless only the engines know these."""
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        has_tokenizer = self._core.fleet.tokenizer(model) is not None
        inputs: list[Input] = []
        for index, one in enumerate(given):
            if not one:
                raise InvalidRequest(f"input {index} is empty", param="input")
            if isinstance(one, str) and has_tokenizer:
                inputs.append(await self._core.turns.tokens(model, one, {}))
                await asyncio.sleep(0)  # others may go on
            else:
                inputs.append(one)
        return inputs


async def _written(request: EmbeddingRequest, embeddings: Sequence[str], num_tokens: int) -> bytes:
    """The answer, written piece by piece, since it may have millions of numbers."""
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
