"""Asks a foreign server about itself."""

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from parrot.engine.openai.dialects import LLAMA_CPP, LM_STUDIO, OLLAMA, SGLANG, VLLM, Dialect
from parrot.protocol.errors import EngineFailed, ParrotError
from parrot.protocol.http import HttpClient

PROBE_TIMEOUT_S = 5.0
_MAX_METRICS = 2**20  # bytes
_MAX_DIGITS = 16
_MAX_LEN = 2**53  # Longest context, in tokens, that is believed.
_MAX_VERSION = 256  # characters
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ModelEntry(BaseModel):
    """A model in a server's list. `max_model_len`: tokens of prompt and output; null: not told."""

    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None

    @property
    def max_len(self) -> int | None:
        """`max_model_len`, unless it cannot be true."""
        return _length(self.max_model_len)


class _ModelList(BaseModel):
    data: list[ModelEntry]


@dataclass(frozen=True, slots=True)
class Told:
    """A server's answers; None or empty: not told. `can`, `cannot`: of `FEATURES`. `max_len`:
    tokens of prompt and output."""

    version: str = ""
    kept_tokens: int | None = None
    kept_prompts: int | None = None
    can: frozenset[str] = frozenset()
    cannot: frozenset[str] = frozenset()
    max_len: int | None = None


async def list_models(http: HttpClient) -> list[ModelEntry]:
    """The models of a server, from `/models`. Raises `ParrotError`."""
    answer = await http.request("GET", "/models", timeout_s=PROBE_TIMEOUT_S)
    try:
        return _ModelList.model_validate(answer).data
    except ValidationError:
        raise EngineFailed(f"{http.base_url}/models is not a list of models") from None


async def ask_server(http: HttpClient, dialect: Dialect, model: str) -> Told:
    """Ask the server at the root of its address. A missing route tells nothing."""
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
        return Told(build, kept_prompts=slots or None, max_len=_length(context))
    if dialect is OLLAMA:
        version = await _json(http, "/api/version")
        context = await _context_of_ollama(http, model)
        return Told(_text(version.get("version")), max_len=context)
    if dialect is LM_STUDIO:
        card = await _json(http, f"/api/v0/models/{quote(model, safe='/')}")
        length = card.get("loaded_context_length") or card.get("max_context_length")
        return Told(max_len=_length(length))
    return Told()


async def _context_of_ollama(http: HttpClient, model: str) -> int | None:
    """The context that the model is loaded with. None: it is not loaded, so that is not known."""
    loaded = (await _json(http, "/api/ps")).get("models")
    for entry in loaded if isinstance(loaded, list) else ():
        if isinstance(entry, dict) and model in (entry.get("name"), entry.get("model")):
            return _length(entry.get("context_length"))
    return None


def _of_vllm(version: dict[str, Any], metrics: str) -> Told:
    found = _CACHE_CONFIG.search(metrics)
    cache = dict(_LABEL.findall(found[1])) if found else {}
    kept = _count(cache.get("kv_cache_size_tokens"))
    if kept is None:
        num_blocks, size = _count(cache.get("num_gpu_blocks")), _count(cache.get("block_size"))
        kept = _count(num_blocks * size) if num_blocks is not None and size is not None else None
    if cache.get("enable_prefix_caching") == "False":
        kept = 0
    return Told(_text(version.get("version")), kept)


def _of_sglang(info: dict[str, Any]) -> Told:
    """Priorities are for us only where low ones go first."""
    kept = 0 if info.get("disable_radix_cache") else _count(info.get("max_total_num_tokens"))
    by_priority = info.get("enable_priority_scheduling") is True
    lowest_first = info.get("schedule_low_priority_values_first") is True
    return Told(
        _text(info.get("version")),
        kept,
        can=frozenset({"priority"} if by_priority and lowest_first else ()),
        cannot=frozenset({"cached_tokens"} if info.get("enable_cache_report") is False else ()),
    )


def _count(value: Any) -> int | None:
    """None for what is no count, or none that a server could have."""
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
    """The text at `/metrics`, or its beginning. Raises as `HttpClient.text` does."""
    return await http.text("/metrics", limit=_MAX_METRICS, timeout_s=PROBE_TIMEOUT_S)


async def _metrics(http: HttpClient) -> str:
    try:
        return await read_metrics(http)
    except ParrotError:
        return ""
