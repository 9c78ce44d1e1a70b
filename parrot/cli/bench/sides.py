"""The sides of a comparison: a server, and the style in which programs use it."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from parrot.cli.bench.openai_client import OpenAIProgram, OpenAITarget, openai_http
from parrot.cli.bench.program import Backend, Network
from parrot.cli.bench.text import COMMON_WORDS, TextSource
from parrot.cli.bench.variables import GraphProgram
from parrot.protocol.errors import EngineFailed, ParrotError, Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient

VARIABLES, OPENAI = "variables", "OpenAI API"
_SHORT, _LONG = 16, len(COMMON_WORDS)
_PROBE_S = 10.0
_CHAT = "use --chat if the server has chat completions only"


class CannotMeasure(Exception):
    """The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server, its key and its model. `key_option`, `model_option`: the options that set them."""

    url: str
    api_key: str | None
    model: str | None
    key_option: str
    model_option: str

    def refuses(self, error: ParrotError, advice: str) -> CannotMeasure:
        if error.message.startswith(("HTTP 401", "HTTP 403")):
            advice = f"set its key with {self.key_option}"
        return CannotMeasure(f"{self.url} refuses a request: {error.message}; {advice}")


@dataclass(frozen=True, slots=True)
class Side:
    """A server, a style, and prompt texts that no other side has."""

    style: str
    url: str
    model: str
    backend: Backend
    text: TextSource
    notes: list[str] = field(default_factory=list)


class Connections:
    """Connects to the servers. The stack closes the connections."""

    def __init__(self, stack: AsyncExitStack, *, is_chat: bool, timeout_s: float) -> None:
        self._stack = stack
        self._is_chat = is_chat
        self._timeout_s = timeout_s

    async def sides(
        self, first: Address, others: Sequence[Address], *, is_application: bool
    ) -> list[Side]:
        """If the first server is a ServeCore, its side runs applications by variables. Without
        other servers, a second side runs plain calls there. Raises `CannotMeasure`."""
        by_variables = is_application and await self._is_serve_core(first)
        asked = [*others] if by_variables and others else [first, *others]
        plain = [await self._openai(address) for address in asked]
        if not by_variables:
            return _with_own_texts(plain)
        known = plain[0] if not others else await self._openai(first)
        return _with_own_texts([self._variables(first, known), *plain])

    async def _is_serve_core(self, address: Address) -> bool:
        async with HttpClient(_root(address.url)) as http:
            try:
                answer = await http.request("GET", "/ready", timeout_s=_PROBE_S)
            except ParrotError as error:
                if error.type == "no_engine":
                    raise CannotMeasure(
                        f"no engine serves a model at {address.url}; `parrot top` shows engines"
                    ) from None
                return False
        return isinstance(answer, dict) and "num_queued" in answer

    def _variables(self, address: Address, known: Side) -> Side:
        client = ServeClient(HttpClient(_root(address.url)))
        self._stack.push_async_callback(client.close)
        key, model = address.api_key, known.model

        def program(app: str) -> GraphProgram:
            return GraphProgram(client, Network(), app, api_key=key, model=model)

        backend = Backend(program, client.close)
        return replace(known, style=VARIABLES, backend=backend, notes=[])

    async def _openai(self, address: Address) -> Side:
        http = openai_http(address.url, address.api_key)
        self._stack.push_async_callback(http.close)
        model = await _model(http, address)
        target = OpenAITarget(http, model, self._is_chat, self._timeout_s)
        notes: list[str] = []
        target, tokens_per_word = await _tried(target, address, notes)
        return Side(
            OPENAI,
            address.url,
            model,
            Backend(lambda app: OpenAIProgram(target, Network()), http.close),
            TextSource(COMMON_WORDS, tokens_per_word=tokens_per_word),
            notes=notes,
        )


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _with_own_texts(sides: Sequence[Side]) -> list[Side]:
    """Sides may share a cache of prefixes, even where their addresses differ."""
    return [replace(side, text=side.text.of_side(n)) for n, side in enumerate(sides)]


async def _model(http: HttpClient, address: Address) -> str:
    """The requested model, or the first model that is served. Raises `CannotMeasure`."""
    try:
        answer = await http.request("GET", "/v1/models", timeout_s=_PROBE_S)
        served = [str(card["id"]) for card in answer["data"]]
    except Unavailable as error:
        raise CannotMeasure(
            f"{error.message}. `parrot up MODEL` starts a server; `parrot bench URL` measures one "
            "elsewhere"
        ) from None
    except ParrotError as error:
        advice = "is it a server with OpenAI's API? Its address usually ends in /v1"
        raise address.refuses(error, advice) from None
    except (KeyError, TypeError):
        raise CannotMeasure(f"{address.url} is not a server with OpenAI's API") from None
    if not served:
        raise CannotMeasure(
            f"{address.url} serves no model yet; `parrot top` shows a ServeCore's engines"
        )
    if address.model is not None and address.model not in served:
        raise CannotMeasure(
            f"{address.model} is not served at {address.url}; {address.model_option} accepts "
            f"{', '.join(served)}"
        )
    return served[0] if address.model is None else address.model


async def _tried(
    target: OpenAITarget, address: Address, notes: list[str]
) -> tuple[OpenAITarget, float]:
    """A target whose requests the server accepts, and its mean tokens of a common word. Raises
    `CannotMeasure`."""
    try:
        try:
            few = await _prompt_tokens(target, _SHORT)
        except EngineFailed:
            target = replace(target, ignores_eos=False)
            few = await _prompt_tokens(target, _SHORT)
            notes.append("the server does not know `ignore_eos`: its outputs may be shorter")
        many = await _prompt_tokens(target, _LONG)
    except ParrotError as error:
        advice = "see the server's log" if target.is_chat else _CHAT
        raise address.refuses(error, advice) from None
    if few is None or many is None or many <= few:
        notes.append("the server does not count tokens: lengths are words")
        return target, 1.0
    return target, (many - few) / (_LONG - _SHORT)


async def _prompt_tokens(target: OpenAITarget, num_words: int) -> int | None:
    """The server's token count of a prompt of `num_words`; None: it does not report one. Raises
    `ParrotError`."""
    prompt = "".join(COMMON_WORDS[:num_words])
    answer = await target.http.request(
        "POST",
        target.path,
        body=target.body(prompt, max_tokens=1, temperature=0.0, ignore_eos=True),
        timeout_s=target.timeout_s,
    )
    try:
        return int(answer["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError):
        return None
