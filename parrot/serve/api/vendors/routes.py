"""Which endpoint of which vendor answers which path."""

from parrot.protocol.endpoint import Endpoint
from parrot.serve.api.vendors.anthropic_errors import anthropic_error
from parrot.serve.api.vendors.chat_completions import ChatCompletions
from parrot.serve.api.vendors.completions import Completions
from parrot.serve.api.vendors.endpoint import VendorEndpoint
from parrot.serve.api.vendors.messages import Messages
from parrot.serve.api.vendors.openai_errors import openai_error
from parrot.serve.core import ServeCore

_ERRORS = (401, 404, 413, 429, 499, 502, 503, 504)


def vendor_endpoints(core: ServeCore) -> list[Endpoint]:
    chat = ChatCompletions(core.turns)
    completions = Completions(core.turns)
    messages = Messages(core.turns)
    return [
        VendorEndpoint(
            core,
            openai_error,
            "POST",
            "/v1/chat/completions",
            chat.create,
            "OpenAI's chat completions",
            errors=_ERRORS,
        ),
        VendorEndpoint(
            core,
            openai_error,
            "POST",
            "/v1/completions",
            completions.create,
            "OpenAI's completions of plain text",
            errors=_ERRORS,
        ),
        VendorEndpoint(
            core,
            anthropic_error,
            "POST",
            "/v1/messages",
            messages.create,
            "Anthropic's messages",
            errors=_ERRORS,
        ),
        VendorEndpoint(
            core,
            anthropic_error,
            "POST",
            "/v1/messages/count_tokens",
            messages.count,
            "The tokens of a prompt, as Anthropic counts them",
            errors=(401, 404, 413),
        ),
    ]
