"""Probes a foreign server for its models, version, cache size and features."""

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from parrot.engine.openai.dialects import LLAMA_CPP, LM_STUDIO, OLLAMA, SGLANG, VLLM, Dialect
from parrot.protocol.errors import EngineFailed, ParrotError
from parrot.protocol.http import HttpClient

PROBE_TIMEOUT_S = 5.0  # Timeout of each request of a probe, in seconds.
_MAX_METRICS = 2**20  # Bytes of `/metrics` that are read.
_MAX_DIGITS = 16  # Numbers with this number of digits or more are ignored.
_MAX_LEN = 2**53  # Longest plausible context, in tokens. Longer ones are ignored.
_MAX_VERSION = 256  # Characters of a version that are kept.
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ModelEntry(BaseModel):
    """A model in a server's list. `max_model_len`: tokens of prompt and output. None: unknown."""

    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None

    @property
    def max_len(self) -> int | None:
        """`max_model_len`, or None if the value is not plausible."""
        return _length(self.max_model_len)


class _ModelList(BaseModel):
    data: list[ModelEntry]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe. None or empty: the server does not report the value."""

    version: str = ""
    kept_tokens: int | None = None  # Size of its prefix cache in tokens.
    kept_prompts: int | None = None  # Size of its prefix cache in prompts.
    can: frozenset[str] = frozenset()  # Supported features out of `FEATURES`.
    cannot: frozenset[str] = frozenset()  # Unsupported features out of `FEATURES`.
    max_len: int | None = None  # Tokens of prompt and output.


async def list_models(http: HttpClient) -> list[ModelEntry]:
    """The models of a server, from `/models`. Raises `ParrotError`."""
    answer = await http.request("GET", "/models", timeout_s=PROBE_TIMEOUT_S)
    try:
        return _ModelList.model_validate(answer).data
    except ValidationError:
        raise EngineFailed(f"{http.base_url}/models is not a list of models") from None


async def ask_server(http: HttpClient, dialect: Dialect, model: str) -> ProbeResult:
    """Probe the server at the root of its URL. A missing route leaves values unknown."""
    if dialect is VLLM:
        version = await _json(http, "/version")
        return _of_vllm(version, await _metrics(http))
    if dialect is SGLANG:
        info = await _json(http, "/server_info") or await _json(http, "/get_server_info")
        return _of_sglang(info)
    if dialect is LLAMA_CPP:
        props = await _json(http, "/props")
        slots = _count(props.get("total_slots"))
        defaults = props.get("default_generation_settings")
        context = defaults.get("n_ctx") if isinstance(defaults, dict) else None
        build = _text(props.get("build_info"))
        return ProbeResult(build, kept_prompts=slots or None, max_len=_length(context))
    if dialect is OLLAMA:
        version = await _json(http, "/api/version")
        context = await _context_of_ollama(http, model)
        return ProbeResult(_text(version.get("version")), max_len=context)
    if dialect is LM_STUDIO:
        card = await _json(http, f"/api/v0/models/{quote(model, safe='/')}")
        length = card.get("loaded_context_length") or card.get("max_context_length")
        return ProbeResult(max_len=_length(length))
    return ProbeResult()


async def _context_of_ollama(http: HttpClient, model: str) -> int | None:
    """The context length with which the model is loaded. None: the model is not loaded."""
    loaded = (await _json(http, "/api/ps")).get("models")
    for entry in loaded if isinstance(loaded, list) else ():
        if isinstance(entry, dict) and model in (entry.get("name"), entry.get("model")):
            return _length(entry.get("context_length"))
    return None


def _of_vllm(version: dict[str, Any], metrics: str) -> ProbeResult:
    found = _CACHE_CONFIG.search(metrics)
    cache = dict(_LABEL.findall(found[1])) if found else {}
    kept = _count(cache.get("kv_cache_size_tokens"))
    if kept is None:
        num_blocks, size = _count(cache.get("num_gpu_blocks")), _count(cache.get("block_size"))
        kept = _count(num_blocks * size) if num_blocks is not None and size is not None else None
    if cache.get("enable_prefix_caching") == "False":
        kept = 0
    return ProbeResult(_text(version.get("version")), kept)


def _of_sglang(info: dict[str, Any]) -> ProbeResult:
    """The values of SGLang. It supports `priority` only if lower values run first, as in Parrot."""
    kept = 0 if info.get("disable_radix_cache") else _count(info.get("max_total_num_tokens"))
    by_priority = info.get("enable_priority_scheduling") is True
    lowest_first = info.get("schedule_low_priority_values_first") is True
    return ProbeResult(
        _text(info.get("version")),
        kept,
        can=frozenset({"priority"} if by_priority and lowest_first else ()),
        cannot=frozenset({"cached_tokens"} if info.get("enable_cache_report") is False else ()),
    )


def _count(value: Any) -> int | None:
    """The value as a number. None if it is not a whole number, or has 16 digits or more."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS else None


def _length(value: Any) -> int | None:
    """A context length in tokens. None for values that cannot be one."""
    length = _count(value)
    return length if length is not None and 0 < length <= _MAX_LEN else None


def _text(value: Any) -> str:
    return value[:_MAX_VERSION] if isinstance(value, str) else ""


async def _json(http: HttpClient, path: str) -> dict[str, Any]:
    try:
        answer = await http.request("GET", path, timeout_s=PROBE_TIMEOUT_S)
    except ParrotError:
        return {}
    return answer if isinstance(answer, dict) else {}


async def read_metrics(http: HttpClient) -> str:
    """The first 1 MiB of `/metrics`. Raises the errors of `HttpClient.text`."""
    return await http.text("/metrics", limit=_MAX_METRICS, timeout_s=PROBE_TIMEOUT_S)


async def _metrics(http: HttpClient) -> str:
    try:
        return await read_metrics(http)
    except ParrotError:
        return ""
