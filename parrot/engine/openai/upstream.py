"""The client of the foreign server: address, requests, errors and retries."""

import logging
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import orjson
import stamina

from parrot.engine.config import OpenAIConfig
from parrot.engine.openai.dialects import BY_OWNER, DIALECTS, OPENAI, Dialect, LoadMetrics
from parrot.engine.openai.logprobs import prompt_logprobs
from parrot.engine.openai.probe import (
    ModelEntry,
    ProbeResult,
    ask_server,
    list_models,
    read_metrics,
)
from parrot.engine.openai.request_ids import IdsInFlight
from parrot.engine.openai.wire import (
    DONE,
    Embeddings,
    Question,
    ServerAnswer,
    Target,
    parse_answer,
    parse_embeddings,
    request_body,
)
from parrot.protocol.connections import Origin, Reply, ServerConnections
from parrot.protocol.engine_api import Capabilities
from parrot.protocol.errors import (
    EngineFailed,
    InvalidRequest,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
    Unavailable,
    UnsupportedField,
)
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import Logprobs, SamplingConfig
from parrot.protocol.transport import retry_after_s
from parrot.utils.config import ConfigError

_MAX_MESSAGE = 500  # Characters of a server's message that are kept.
_MAX_NAME = 256  # Characters of a server's `param` or `code` that are kept.
_MAX_WAIT_S = 60.0  # A request whose server asks for a longer wait is not repeated.
_TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_TOO_LONG_WORDS = ("context length", "context window", "context size", "maximum context")
_OVERLOADED = frozenset({429, 503, 529})
_NO_CREDIT = frozenset({"insufficient_quota", "billing_hard_limit_reached"})


Backoff = Callable[[Exception], bool | float]
"""Stamina's hook: whether to retry, or the seconds to wait before a retry."""


class Overloaded(QuotaExceeded):
    """The foreign server is overloaded. This is not an `Unavailable`, because ServeCore would then
    consider this engine and its contexts lost."""


class ClientKeyRefused(InvalidRequest, status=401):
    """The foreign server refused the client's key."""

    code = "invalid_api_key"


class NotServed(EngineFailed):
    """The foreign server does not have the model or the endpoint."""


class TemporaryFailure(EngineFailed):
    """The foreign server failed temporarily."""


def retries_temporary(error: Exception) -> bool | float:
    """Retry temporary errors. The server's `Retry-After` sets the wait, up to 60 s."""
    if isinstance(error, Overloaded):
        wait_s = error.retry_after_s
        return True if wait_s is None else (wait_s <= _MAX_WAIT_S and wait_s)
    return isinstance(error, Unavailable | TemporaryFailure)


def refused_embedding(error: EngineFailed) -> ParrotError:
    """Translates an error of an embedding request. llama-cpp-python answers 500 if the model has no
    embeddings, and for inputs of token ids."""
    if isinstance(error, NotServed) or "embedding=True" in error.message:
        text = f"the model has no embeddings: {error.message}"
        return UnsupportedField(text, param="model")
    if "validation error" in error.message:
        return InvalidRequest(error.message, param="input")
    return error


class ErrorTranslator:
    """Translates a foreign server's errors into Parrot's. Messages never contain the API key.

    HTTP                     Parrot's error        retried
    400, context too long    PromptTooLong         no
    400, 413, 422            InvalidRequest        no
    401, 403                 EngineFailed          no (our key, not the caller's)
    401, 403 of their key    ClientKeyRefused      no
    404, 405, 501            NotServed             no (wrong model or address)
    429, 503, 529            QuotaExceeded         yes, unless credit is used up
    408, 409, 500 and others EngineFailed          yes
    no connection            Unavailable           yes
    """

    def __init__(self, server: str, secret: str | None, *, is_of_client: bool = False) -> None:
        """`server` names the server in messages. `is_of_client`: the key is the client's."""
        self._server = server
        self._is_of_client = is_of_client
        self._secret = secret

    def read(self, payload: Any, status: int, headers: Mapping[str, str]) -> ParrotError:
        """The error for a body `{"error": {"message", "type", "param", "code"}}`, for FastAPI's
        `{"detail": ...}`, or for any other body."""
        error = payload.get("error", payload) if isinstance(payload, Mapping) else None
        details = error if isinstance(error, Mapping) else {}
        names = {name for key in ("code", "type") if isinstance(name := details.get(key), str)}
        message = self._clean(details.get("message") or details.get("detail") or error)
        if status in (401, 403) and self._is_of_client:
            return ClientKeyRefused(f"the server {self._server} refused your API key")
        if status in (401, 403):
            return EngineFailed(
                f"the server {self._server} refused the API key (HTTP {status}); "
                "check `instance.api_key` or the environment variable it stands for"
            )
        if names & _NO_CREDIT:
            return EngineFailed(f"the account at {self._server} has no credit: {message}")
        if status in _OVERLOADED:
            text = f"the server {self._server} is overloaded (HTTP {status}): {message}"
            return Overloaded(text, retry_after_s=retry_after_s(headers))
        if status in (400, 413, 422):
            return self._refused(names, message, details)
        text = f"the server {self._server} answered HTTP {status}: {message}"
        if status in (404, 405, 501):
            return NotServed(text)
        may_pass = status >= 500 or status in (408, 409)
        told_not_to = headers.get("x-should-retry") == "false"
        return TemporaryFailure(text) if may_pass and not told_not_to else EngineFailed(text)

    def read_frame(self, payload: Any) -> ParrotError:
        """The error for the error event of a stream. vLLM's `code` is the HTTP status."""
        error = payload.get("error") if isinstance(payload, Mapping) else None
        code = error.get("code") if isinstance(error, Mapping) else None
        return self.read(payload, code if isinstance(code, int) else 500, {})

    def _refused(self, names: set[Any], message: str, details: Mapping[str, Any]) -> InvalidRequest:
        """The error for a request that the server refused, with its `param` and `code`."""
        param, code = details.get("param"), details.get("code")
        error: InvalidRequest
        lower = message.lower()
        if names & _TOO_LONG_CODES or any(words in lower for words in _TOO_LONG_WORDS):
            error = PromptTooLong(message)
        else:
            error = InvalidRequest(f"the server {self._server} refused the request: {message}")
        error.param = param[:_MAX_NAME] if isinstance(param, str) else None
        error.code = code[:_MAX_NAME] if isinstance(code, str) else None
        return error

    def _clean(self, message: object) -> str:
        text = "no reason given"
        if isinstance(message, str):
            text = message
        elif message:
            text = orjson.dumps(message, default=str).decode()
        if self._secret:
            text = text.replace(self._secret, "***")
        return text[:_MAX_MESSAGE]


logger = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
# First api-version of Azure with `max_completion_tokens` and `stream_options`.
_AZURE_NEW_SINCE = "2024-09-01"
_ANSWER_TIMEOUT_S = 600.0  # Seconds for a whole answer, or between two chunks of a stream.
_ATTEMPTS = 5  # Attempts of a request that fails temporarily.
_UNKNOWN = ProbeResult()
_R = TypeVar("_R")


def _base_url(config: OpenAIConfig) -> str:
    """The URL before `/completions`. On Azure it contains the model. Raises `ConfigError` if it
    cannot be sent, or must not be logged."""
    instance = config.instance
    url = (instance.base_url or OPENAI_URL).rstrip("/")
    if instance.is_azure:
        assert instance.azure_endpoint is not None
        endpoint = instance.azure_endpoint.rstrip("/")
        url = f"{endpoint}/openai/deployments/{quote(config.model, safe='')}"
    parts = urlsplit(url)
    if parts.username is not None:
        raise ConfigError(
            f"the URL of {parts.hostname} must have no user name and no password, because messages "
            "contain the URL"
        )
    if re.search("[^!-~]", url):
        raise ConfigError(f"the URL {url!r} must have no blanks and only ASCII characters")
    return url


def _api_key(config: OpenAIConfig, environ: Mapping[str, str]) -> str | None:
    instance = config.instance
    if instance.api_key_file is not None:
        return _read_key(instance.api_key_file)
    names = ["AZURE_OPENAI_API_KEY"] if instance.is_azure else []
    found = (environ.get(name) for name in (*names, "OPENAI_API_KEY"))
    key = instance.api_key or next(filter(None, found), None)
    if key is None and (instance.is_azure or _base_url(config) == OPENAI_URL):
        raise ConfigError(
            "`instance.api_key`: required, here or in the environment variable OPENAI_API_KEY, "
            "unless `instance.base_url` is a server that needs no key"
        )
    return key


def _read_key(path: str) -> str:
    try:
        key = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`instance.api_key_file`: cannot read {path}: {error}") from None
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"`instance.api_key_file`: {path} must contain one API key")
    return key


def _tls(config: OpenAIConfig) -> ssl.SSLContext | None:
    """The trusted certificates. None: the certificates of the system."""
    path = config.instance.ca_file
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=Path(path).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"`instance.ca_file`: cannot read {path}: {error}") from None


def server_client(config: OpenAIConfig, environ: Mapping[str, str] = os.environ) -> HttpClient:
    """An HTTP client of the foreign server that raises Parrot's errors. Raises `ConfigError` if the
    key is missing or a file cannot be read."""
    key = _api_key(config, environ)
    return _client(config, key, _tls(config), ErrorTranslator(_base_url(config), key))


def _client(
    config: OpenAIConfig, key: str | None, tls: ssl.SSLContext | None, errors: ErrorTranslator
) -> HttpClient:
    bearer_token, headers = _places_of_key(config, key)
    return HttpClient(
        _base_url(config),
        bearer_token=bearer_token,
        headers=headers,
        read_error=errors.read,
        tls=tls,
    )


def _server_connections(
    config: OpenAIConfig, key: str | None, tls: ssl.SSLContext | None, errors: ErrorTranslator
) -> ServerConnections:
    instance = config.instance
    version = {"api-version": instance.azure_api_version}
    bearer_token, headers = _places_of_key(config, key)
    return ServerConnections(
        _base_url(config),
        bearer_token=bearer_token,
        headers=headers,
        query=f"?{urlencode(version)}" if instance.is_azure else "",
        read_error=errors.read,
        tls=tls,
        timeout_s=_ANSWER_TIMEOUT_S,
    )


def _places_of_key(
    config: OpenAIConfig, key: str | None
) -> tuple[str | None, dict[str, str] | None]:
    """The bearer token and the other headers that send the key."""
    if config.instance.is_azure:
        return None, {"api-key": key} if key else None
    return key, None


def _target(config: OpenAIConfig) -> Target:
    """The endpoint and its field names. OpenAI's newer models reject `max_tokens`, but most other
    servers accept only `max_tokens`."""
    instance = config.instance
    is_chat = instance.api_endpoint == "chat"
    is_new = not instance.is_azure or instance.azure_api_version >= _AZURE_NEW_SINCE
    is_openai = instance.is_azure or _base_url(config) == OPENAI_URL
    length_field = "max_completion_tokens" if is_openai and is_new else "max_tokens"
    return Target(config.model, is_chat, length_field, stream_usage=is_new)


async def _repeated(
    attempt: Callable[[], Awaitable[_R]], backoff: Backoff, first: ParrotError
) -> _R:
    """The result of `attempt` after its `first` failure. It is repeated after the failures that
    `backoff` chooses. Raises the last failure."""
    if not backoff(first):
        raise first
    # Stamina's loop starts after the first failure, because creating it takes 0.3 ms.
    async for again in stamina.retry_context(on=backoff, attempts=_ATTEMPTS, timeout=None):
        with again:
            if again.num == 1:
                raise first
            return await attempt()
    raise AssertionError("the last attempt returns or raises")


class Upstream:
    """One foreign server and one of its models. Before a successful `probe` the capabilities are
    unknown, and the server is treated as one with OpenAI's fields only."""

    def __init__(
        self,
        config: OpenAIConfig,
        environ: Mapping[str, str] = os.environ,
        backoff: Backoff = retries_temporary,
        *,
        forwards_key: bool = False,
    ) -> None:
        """`forwards_key`: the client's key is sent instead of the configured key, which then only
        serves to ask the server for its state."""
        instance = config.instance
        self._backoff = backoff
        key, tls = _api_key(config, environ), _tls(config)
        self._translator = ErrorTranslator(_base_url(config), key)
        self._target = _target(config)
        self._http = _client(config, key, tls, self._translator)
        self._forwards_key = forwards_key
        if forwards_key:
            self._translator = ErrorTranslator(_base_url(config), None, is_of_client=True)
        own_key = None if forwards_key else key
        self._calls = _server_connections(config, own_key, tls, self._translator)
        self._root = HttpClient(
            self._http.base_url.removesuffix("/v1"),
            bearer_token=None if instance.is_azure else key,
            tls=tls,
        )
        self._instance = instance
        self._given = None if instance.server is None else DIALECTS[instance.server]
        self._dialect: Dialect | None = None
        self._assumed = self._given or OPENAI  # The kind, or until the probe the assumed kind.
        self._can = self._features(self._assumed)  # The features of that kind.
        self._ids = IdsInFlight()
        self.capabilities = Capabilities()
        self.max_model_len: int | None = None
        self._was_unreachable = False  # The last probe got no answer.
        if instance.is_azure:
            self._settle(OPENAI, _UNKNOWN)

    async def close(self) -> None:
        await self._http.close()
        await self._calls.close()
        await self._root.close()

    async def probe(self) -> None:
        """Find out the kind and the capabilities of the server, unless they are known."""
        if self._dialect is not None:
            return
        try:
            models = await list_models(self._http)
        except ParrotError as error:
            self._was_unreachable = isinstance(error, Unavailable | Overloaded)
            logger.warning("%s/models: %s", self._http.base_url, error.message)
            return
        card = next((model for model in models if model.id == self._target.model), None)
        if card is None:
            logger.warning("%s does not list `%s`", self._http.base_url, self._target.model)
            card = models[0] if models else ModelEntry()
        dialect = self._given or BY_OWNER.get(card.owned_by, OPENAI)
        told = await ask_server(self._root, dialect, self._target.model)
        self.max_model_len = card.max_len or told.max_len
        self._settle(dialect, told)

    def _settle(self, dialect: Dialect, told: ProbeResult) -> None:
        given = self._instance
        kept_tokens = told.kept_tokens if given.kept_tokens is None else given.kept_tokens
        kept_prompts = given.kept_prompts or told.kept_prompts or dialect.kept_prompts
        self._dialect = self._assumed = dialect
        self._can = self._features(dialect, told)
        self.capabilities = Capabilities(
            server=f"{dialect.name} {told.version}".strip(),
            features=self._can,
            kept_tokens=kept_tokens,
            kept_prompts=kept_prompts,
        )

    def check(self, needs: frozenset[str]) -> None:
        """Raises `UnsupportedField` if the server is known not to support a needed feature."""
        if self._dialect is not None:
            self._require(self._dialect, needs)

    async def check_with_probe(self, needs: frozenset[str]) -> None:
        """As `check`, but probe an unknown server first, if the last probe got no answer or the
        assumed kind lacks a needed feature."""
        if self._dialect is None and (self._was_unreachable or not needs <= self._can):
            await self.probe()
        self._require(self._assumed, needs)

    @property
    def is_probed(self) -> bool:
        """Whether the kind of the server is known."""
        return self._dialect is not None

    @property
    def is_serial(self) -> bool:
        return self._dialect is not None and self._dialect.is_serial

    @property
    def answers_while_busy(self) -> bool:
        """Whether the server is known to answer other requests during long computations."""
        return self._assumed.answers_while_busy

    @property
    def load_metrics(self) -> LoadMetrics | None:
        """The names of the server's load metrics. None: it has none, or its kind is unknown."""
        return None if self._dialect is None else self._dialect.load

    async def metrics(self) -> str:
        """The first 1 MiB of the server's metrics."""
        return await read_metrics(self._root)

    def _features(self, dialect: Dialect, told: ProbeResult = _UNKNOWN) -> frozenset[str]:
        """The server's features. The configuration overrides the probe, which overrides the
        dialect."""
        usual = (dialect.features(self._target.is_chat) | told.can) - told.cannot
        given = self._instance.features
        has = {name for name in given if given[name]}
        return (usual | has) - (given.keys() - has)

    def _require(self, dialect: Dialect, needs: frozenset[str]) -> None:
        if lacking := needs - self._can:
            server = f"the openai engine ({dialect.name} server)"
            name = min(lacking)
            raise UnsupportedField(f"{server} does not support `{name}` yet", param=name)

    async def complete(self, question: Question, backoff: Backoff | None = None) -> ServerAnswer:
        """The whole answer. `backoff` replaces the constructor's."""
        request_id = self._ids.claim(self._id_to_pass(question.request_id))
        try:
            payload = await self._within_context(
                question,
                lambda question: self._calls.post(
                    self._path(question),
                    self._body(question),
                    self._origin(question, request_id),
                ),
                backoff,
            )
        finally:
            self._ids.release(request_id)
        answer = parse_answer(payload)
        if answer.choice is None:
            raise EngineFailed("the server behind this engine sent an answer without a choice")
        return answer

    async def stream(self, question: Question, take: Callable[[ServerAnswer], None]) -> None:
        """Call `take` with each chunk of an answer, which is the whole answer if the server does
        not stream. The request is retried only before the first chunk. Raises `Unavailable` if the
        stream ends before the answer has a finish reason."""
        request_id = self._ids.claim(self._id_to_pass(question.request_id))
        has_ended = False

        def on_event(_: str, data: bytes) -> bool:
            nonlocal has_ended
            if data.strip() == DONE:
                return True
            chunk = self._chunk(data)
            has_ended = has_ended or chunk.finish_reason is not None
            take(chunk)
            return False

        def begin(question: Question) -> Awaitable[Reply]:
            return self._calls.stream(
                self._path(question),
                self._body(question, stream=True),
                on_event,
                self._origin(question, request_id),
            )

        try:
            reply = await self._within_context(question, begin)
            await reply.end()
            if reply.body:
                take(self._chunk(bytes(reply.body)))
            elif not reply.has_events and self.is_serial:
                # llama-cpp-python sends an empty stream instead of an error, and closes the
                # connection, which the next request may still use.
                take(await self.complete(question, retries_temporary))
            elif not (reply.is_complete and has_ended):
                raise Unavailable(f"the stream of {self._http.base_url} was cut off")
        finally:
            self._ids.release(request_id)

    def _id_to_pass(self, request_id: str) -> str:
        return request_id if self._assumed.takes_request_id else ""

    async def _within_context(
        self,
        question: Question,
        send: Callable[[Question], Awaitable[_R]],
        backoff: Backoff | None = None,
    ) -> _R:
        """The result of `send`. A chat whose limit exceeds the server's context is sent again
        without the limit, because the limit of a client is often a constant."""
        try:
            return await send(question)
        except ParrotError as error:
            first = error
        backoff = backoff or self._backoff
        try:
            return await _repeated(lambda: send(question), backoff, first)
        except InvalidRequest as error:
            is_limit = isinstance(error, PromptTooLong) or "max_tokens" in error.message
            if not is_limit or question.limit is None or not self._target.asks_chat(question):
                raise
        unlimited = replace(question, has_limit=False)
        try:
            return await send(unlimited)
        except ParrotError as error:
            return await _repeated(lambda: send(unlimited), backoff, error)

    async def embed(
        self,
        inputs: Sequence[list[int] | str],
        traceparent: str = "",
        request_id: str = "",
        client_key: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> Embeddings:
        """The embeddings of the inputs. Raises `UnsupportedField` if the server has none."""
        body = {
            **(extra or {}),
            "model": self._target.model,
            "input": inputs,
            "encoding_format": "float",
        }

        async def ask() -> Any:
            unique = self._ids.claim(self._id_to_pass(request_id))
            try:
                origin = Origin(traceparent, unique, self._bearer(client_key))
                return await self._calls.post("/embeddings", body, origin)
            except EngineFailed as error:
                raise refused_embedding(error) from None
            finally:
                self._ids.release(unique)

        try:
            payload = await ask()
        except ParrotError as error:
            payload = await _repeated(ask, self._backoff, error)
        return parse_embeddings(payload, len(inputs))

    async def score(
        self,
        prompt: list[int] | str,
        num_top: int,
        salt: str,
        client_key: str = "",
    ) -> tuple[Logprobs, int]:
        """The log probabilities of a prompt's tokens, and their number. The request generates one
        token, because some servers reject 0. Raises `UnsupportedField` if the server returns no
        log probabilities."""
        if self._target.is_chat:
            raise UnsupportedField("the server does not support `echo` for chats", param="echo")
        sampling = SamplingConfig(temperature=0.0, max_gen_length=1, logprobs=num_top)
        await self.check_with_probe(sampling.needs())
        question = Question(prompt, sampling, salt, echoes=True, client_key=client_key)
        answer = await self.complete(question)
        num_tokens = answer.usage.prompt_tokens if answer.usage is not None else 0
        return prompt_logprobs(answer.logprobs, num_tokens, num_top), num_tokens

    def _origin(self, question: Question, request_id: str) -> Origin:
        return Origin(question.traceparent, request_id, self._bearer(question.client_key))

    def _bearer(self, client_key: str) -> str | None:
        """The client's key, if the server gets it. None: the configured key, if any."""
        return client_key or None if self._forwards_key else None

    def _path(self, question: Question) -> str:
        return "/chat/completions" if self._target.asks_chat(question) else "/completions"

    def _body(self, question: Question, stream: bool = False) -> dict[str, Any]:
        return request_body(self._target, self._assumed, self._can, question, stream=stream)

    def _chunk(self, data: bytes) -> ServerAnswer:
        try:
            payload = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise EngineFailed("the server behind this engine sent an invalid event") from None
        if isinstance(payload, dict) and payload.get("error") is not None:
            raise self._translator.read_frame(payload)
        return parse_answer(payload)
