"""The routes of all vendors' endpoints."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request

from parrot.gateway.direct import DirectRequests
from parrot.gateway.turns import Turns
from parrot.gateway.vendors.chat_completions import ChatCompletion, ChatCompletions
from parrot.gateway.vendors.completions import Completions, TextCompletion
from parrot.gateway.vendors.endpoint import Offer, VendorEndpoint
from parrot.gateway.vendors.errors import anthropic_error, openai_error
from parrot.gateway.vendors.messages import MessageAnswer, Messages, TokenCount
from parrot.gateway.vendors.responses.fields import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseAnswer,
)
from parrot.gateway.vendors.responses.responses import Responses
from parrot.gateway.vendors.tokens import (
    DetokenizedText,
    EmbeddingList,
    EmbeddingsApi,
    Tokenize,
    Tokens,
)
from parrot.protocol.answers import request_id_of
from parrot.protocol.endpoint import Described, Endpoint
from parrot.protocol.errors import ParrotError
from parrot.serve.core import ServeCore
from parrot.serve.durability import Wait

_ERRORS = (401, 404, 413, 429, 499, 502, 503, 504, 507)
_PARROT_PATHS = ("/v1/session", "/v1/semantic_", "/v1/py_native_call", "/v1/request/")

_KNOWN = (401, 404)
_STREAMING = Described(_ERRORS, may_stream=True)
_COUNTING = Described((*_KNOWN, 413))


def error_form(request: Request, error: ParrotError) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an error, in the format of the API that the path belongs to."""
    path = request.url.path
    if path.startswith("/v1/messages") or "anthropic-version" in request.headers:
        return anthropic_error(error, request_id_of(request))
    if path.startswith("/v1/") and not path.startswith(_PARROT_PATHS):
        return openai_error(error)
    return error.status, error.to_payload()


def _direct(core: ServeCore) -> DirectRequests:
    fleet, tasks = core.fleet, core.tasks
    return DirectRequests(fleet, core.tenants, tasks.meters, tasks.require_room, core.config)


def vendor_endpoints(core: ServeCore, turns: Turns) -> list[Endpoint]:
    messages = Messages(turns)
    of_anthropic = (
        Offer(
            "POST",
            "/v1/messages",
            messages.create,
            "Anthropic's messages",
            MessageAnswer,
            _STREAMING,
            messages.prepare,
        ),
        Offer(
            "POST",
            "/v1/messages/count_tokens",
            messages.count,
            "The tokens of a prompt, as Anthropic counts them",
            TokenCount,
            _COUNTING,
        ),
    )
    return [
        *(
            VendorEndpoint(core, partial(openai_error, prompt=_prompt_of(offer.path)), offer)
            for offer in _openai_offers(core, turns)
        ),
        *(VendorEndpoint(core, anthropic_error, offer) for offer in of_anthropic),
    ]


def _prompt_of(path: str) -> str:
    """The field that holds the prompt."""
    return "messages" if path == "/v1/chat/completions" else "prompt"


def _openai_offers(core: ServeCore, turns: Turns) -> Sequence[Offer]:
    """The endpoints whose errors are in OpenAI's form."""
    direct, chats = _direct(core), ChatCompletions(turns)
    tokenize = Tokenize(core, turns)
    return (
        Offer(
            "POST",
            "/v1/chat/completions",
            chats.create,
            "OpenAI's chat completions",
            ChatCompletion,
            _STREAMING,
            chats.prepare,
        ),
        Offer(
            "POST",
            "/v1/completions",
            Completions(turns, direct).create,
            "OpenAI's completions of plain text",
            TextCompletion,
            _STREAMING,
        ),
        Offer(
            "POST",
            "/v1/embeddings",
            EmbeddingsApi(direct).create,
            "OpenAI's embeddings",
            EmbeddingList,
            Described(_ERRORS),
        ),
        Offer(
            "POST",
            "/tokenize",
            tokenize.tokenize,
            "The tokens of a prompt, in vLLM's format",
            Tokens,
            _COUNTING,
        ),
        Offer(
            "POST",
            "/detokenize",
            tokenize.detokenize,
            "The text of tokens",
            DetokenizedText,
            _COUNTING,
        ),
    )


def response_endpoints(core: ServeCore, responses: Responses) -> list[Endpoint]:
    path, kept = "/v1/responses/{response_id}", Described(_KNOWN)
    create = Offer(
        "POST",
        "/v1/responses",
        responses.create,
        "OpenAI's responses",
        ResponseAnswer,
        _STREAMING,
        responses.prepare,
    )
    others = (
        Offer(
            "POST",
            "/v1/responses/input_tokens",
            responses.count,
            "The tokens of a response's prompt",
            InputTokens,
            _COUNTING,
        ),
        Offer(
            "GET",
            path,
            responses.retrieve,
            "A stored response",
            ResponseAnswer,
            Described(_KNOWN, may_stream=True),
        ),
        Offer("DELETE", path, responses.delete, "Delete a response", DeletedResponse, kept),
        Offer(
            "POST", f"{path}/cancel", responses.cancel, "Cancel a response", ResponseAnswer, kept
        ),
        Offer(
            "GET",
            f"{path}/input_items",
            responses.input_items,
            "The input items of a response",
            ItemList,
            kept,
        ),
    )
    return [
        VendorEndpoint(core, partial(openai_error, prompt="input"), create),
        *(VendorEndpoint(core, openai_error, offer, wait=Wait.PUBLISHED) for offer in others),
    ]
