"""`POST /tokenize` and `/detokenize`, in vLLM's format."""

import asyncio
from typing import Any

import orjson
from pydantic import Field

from parrot.gateway.conversations.turns import Turns
from parrot.gateway.vendors.endpoint import Caller, VendorAnswer
from parrot.gateway.vendors.openai_chat import MAX_MESSAGES, ChatMessage, template_messages
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.fields import Name, Text, TokenIds, Wire
from parrot.serve.core import ServeCore


class TokenizeRequest(Wire):
    """Has a `prompt` or `messages`."""

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
        """The ids of a prompt, as a completion or a chat completion would have it."""
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either a `prompt` or `messages`", param="prompt")
        prompt: Any = request.prompt
        if request.messages is not None:
            prompt = template_messages(request.messages)
        ids = await self._turns.tokens(request.model, prompt, {})
        await asyncio.sleep(0)  # there may be millions
        longest = {card.id: card.max_model_len for card in self._core.models().data}
        return orjson.dumps(
            {"count": len(ids), "max_model_len": longest.get(request.model), "tokens": ids}
        )

    async def detokenize(self, request: DetokenizeRequest, caller: Caller) -> bytes:
        text = await self._turns.text(request.model, request.tokens)
        return orjson.dumps({"prompt": text})
