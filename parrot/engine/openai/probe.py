"""Asks a foreign server about itself."""

import re
from dataclasses import dataclass
from typing import Any

from parrot.engine.openai.dialects import LLAMA_CPP, SGLANG, VLLM, Dialect
from parrot.protocol.errors import ParrotError
from parrot.protocol.http import HttpClient

PROBE_TIMEOUT_S = 5.0
_MAX_METRICS = 2**20  # bytes
_MAX_DIGITS = 16
_MAX_VERSION = 256  # characters
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Told:
    """A server's answers; None or empty: not told. `can`, `cannot`: of `FEATURES`."""

    version: str = ""
    kept_tokens: int | None = None
    kept_prompts: int | None = None
    can: frozenset[str] = frozenset()
    cannot: frozenset[str] = frozenset()


async def ask_server(http: HttpClient, dialect: Dialect) -> Told:
    """Ask the server at the root of its address. A route that it has not tells nothing."""
    if dialect is VLLM:
        version = await _json(http, "/version")
        return _of_vllm(version, await _metrics(http))
    if dialect is SGLANG:
        info = await _json(http, "/server_info") or await _json(http, "/get_server_info")
        return _of_sglang(info)
    if dialect is LLAMA_CPP:
        props = await _json(http, "/props")
        slots = _count(props.get("total_slots"))
        return Told(_text(props.get("build_info")), kept_prompts=slots or None)
    return Told()


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
