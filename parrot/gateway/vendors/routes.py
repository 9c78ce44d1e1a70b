"""Which endpoint of which vendor answers which path."""

from collections.abc import Callable
from typing import Any

from fastapi import Request

from parrot.gateway.direct import DirectRequests
from parrot.gateway.turns import Turns
from parrot.gateway.vendors.chat_completions import ChatCompletion, ChatCompletions
from parrot.gateway.vendors.completions import Completions, TextCompletion
from parrot.gateway.vendors.endpoint import VendorAnswer, VendorEndpoint
from parrot.gateway.vendors.errors import anthropic_error, openai_error
from parrot.gateway.vendors.messages import MessageAnswer, Messages, TokenCount
from parrot.gateway.vendors.responses.fields import (
    DeletedResponse,
    ItemList,
    PromptTokens,
    ResponseAnswer,
)
from parrot.gateway.vendors.responses.responses import Responses
from parrot.gateway.vendors.tokens import (
    DetokenizedText,
    EmbeddingList,
    Embeddings,
    Tokenize,
    Tokens,
)
from parrot.protocol.endpoint import Described, Endpoint
from parrot.protocol.errors import ParrotError
from parrot.protocol.middleware import request_id_of
from parrot.serve.core import ServeCore

_ERRORS = (401, 404, 413, 429, 499, 502, 503, 504, 507)
_PARROT_PATHS = ("/v1/session", "/v1/semantic_", "/v1/py_native_call", "/v1/request/")

_STREAMING = Described(_ERRORS, may_stream=True)


def error_form(request: Request, error: ParrotError) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an error, as whoever uses this path reads it."""
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
    direct = _direct(core)
    completions = Completions(turns, direct)
    messages = Messages(turns)
    return [
        VendorEndpoint(
            core,
            openai_error,
            "POST",
            "/v1/chat/completions",
            ChatCompletions(turns).create,
            "OpenAI's chat completions",
            ChatCompletion,
            described=_STREAMING,
        ),
        VendorEndpoint(
            core,
            openai_error,
            "POST",
            "/v1/completions",
            completions.create,
            "OpenAI's completions of plain text",
            TextCompletion,
            described=_STREAMING,
        ),
        VendorEndpoint(
            core,
            anthropic_error,
            "POST",
            "/v1/messages",
            messages.create,
            "Anthropic's messages",
            MessageAnswer,
            described=_STREAMING,
        ),
        VendorEndpoint(
            core,
            anthropic_error,
            "POST",
            "/v1/messages/count_tokens",
            messages.count,
            "The tokens of a prompt, as Anthropic counts them",
            TokenCount,
            described=Described((401, 404, 413)),
        ),
        VendorEndpoint(
            core,
            openai_error,
            "POST",
            "/v1/embeddings",
            Embeddings(direct).create,
            "OpenAI's embeddings",
            EmbeddingList,
            described=Described(_ERRORS),
        ),
        *_tokenizer_endpoints(core, turns),
    ]


def _tokenizer_endpoints(core: ServeCore, turns: Turns) -> list[Endpoint]:
    tokenize = Tokenize(core, turns)
    verbs: tuple[tuple[str, Callable[..., Any], str, type[VendorAnswer]], ...] = (
        ("/tokenize", tokenize.tokenize, "The tokens of a prompt, as vLLM tells them", Tokens),
        ("/detokenize", tokenize.detokenize, "The text of tokens", DetokenizedText),
    )
    return [
        VendorEndpoint(
            core,
            openai_error,
            "POST",
            path,
            verb,
            summary,
            gives,
            described=Described((401, 404, 413)),
        )
        for path, verb, summary, gives in verbs
    ]


def response_endpoints(core: ServeCore, responses: Responses) -> list[Endpoint]:
    path = "/v1/responses/{response_id}"
    known = (401, 404)
    verbs: tuple[
        tuple[str, str, Callable[..., Any], str, type[VendorAnswer], tuple[int, ...]], ...
    ] = (
        ("POST", "/v1/responses", responses.create, "OpenAI's responses", ResponseAnswer, _ERRORS),
        (
            "POST",
            "/v1/responses/input_tokens",
            responses.count,
            "The tokens of a response's prompt",
            PromptTokens,
            (*known, 413),
        ),
        ("GET", path, responses.retrieve, "A response that is kept", ResponseAnswer, known),
        ("DELETE", path, responses.delete, "Keep a response no more", DeletedResponse, known),
        ("POST", f"{path}/cancel", responses.cancel, "Stop a response", ResponseAnswer, known),
        (
            "GET",
            f"{path}/input_items",
            responses.input_items,
            "What it was made from",
            ItemList,
            known,
        ),
    )
    streaming = (responses.create, responses.retrieve)
    return [
        VendorEndpoint(
            core,
            openai_error,
            method,
            path,
            verb,
            summary,
            gives,
            described=Described(errors, may_stream=verb in streaming),
            adds=verb == responses.create,
        )
        for method, path, verb, summary, gives, errors in verbs
    ]
