"""Asks a foreign server, which may serve others too, about itself and its load."""

import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parrot.engine.openai.dialects import LLAMA_CPP, SGLANG, VLLM, Dialect, LoadMetrics
from parrot.protocol.engine_api import ServerLoad
from parrot.protocol.errors import ParrotError
from parrot.protocol.http import HttpClient
from parrot.utils.tasks import TaskSet

if TYPE_CHECKING:
    from parrot.engine.openai.upstream import Upstream

logger = logging.getLogger(__name__)

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


_MAX_FAILURES = 3  # in a row, until what was read before them is too old
_MAX_REQUESTS = 10**6
_SAMPLE = re.compile(r"^([\w:]+)(?:\{([^}\n]*)\})? ([^\s]+)", re.MULTILINE)


def read_load(
    metrics: str, names: LoadMetrics, num_sent: int, kv_tokens: int = 0
) -> ServerLoad | None:
    """Find the load in the text of `/metrics`; None if it does not tell the number of running
    requests. `num_sent`: requests that this engine has there; `kv_tokens`: size of the KV cache, 0
    if it is not known."""
    wanted = {name for group in (names.running, names.waiting, names.usage) for name in group}
    found: dict[str, dict[str, float]] = {}
    for name, replica, value in _samples(metrics, wanted, names.replica):
        series = found.setdefault(name, {})
        series[replica] = max(value, series.get(replica, 0.0))
    running, waiting = _first(found, names.running), _first(found, names.waiting)
    if not running:
        return None
    num_running = int(min(sum(running), _MAX_REQUESTS))
    num_waiting = int(min(sum(waiting), _MAX_REQUESTS))
    num_others = max(0, num_running + num_waiting - num_sent)
    usage = _first(found, names.usage)
    kv_usage = min(1.0, sum(usage) / len(usage)) if usage else None
    share = num_others / max(1, num_running + num_waiting)
    return ServerLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        num_others=num_others,
        kv_usage=kv_usage,
        other_tokens=int(share * (kv_usage or 0.0) * kv_tokens),
    )


def _samples(metrics: str, wanted: set[str], label: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, replica and value of the wanted series. Where one counts by something else too,
    such as priority or rank, the largest of a replica is its whole."""
    for name, labels, text in _SAMPLE.findall(metrics):
        if name in wanted:
            try:
                value = float(text)
            except ValueError:
                continue
            if math.isfinite(value) and value >= 0:
                yield name, dict(_LABEL.findall(labels)).get(label, ""), value


def _first(found: dict[str, dict[str, float]], names: tuple[str, ...]) -> list[float]:
    """The values, by replica, of the first of the names that is there."""
    return next((list(found[name].values()) for name in names if name in found), [])


class LoadWatch:
    """Reads the server's load when it is told to, one reading at a time. `latest`: the newest; None
    before the first, and once several in a row have failed."""

    def __init__(
        self,
        upstream: "Upstream",
        num_sent: Callable[[], int],
        on_read: Callable[[ServerLoad | None], None],
    ) -> None:
        """`num_sent`: requests that this engine has there now. `on_read` gets each new `latest`."""
        self._upstream = upstream
        self._num_sent = num_sent
        self._on_read = on_read
        self._tasks = TaskSet()
        self._num_failures = 0
        self.latest: ServerLoad | None = None

    def begin(self) -> None:
        """Read the load anew, unless that is under way or the server is not known to tell it."""
        names = self._upstream.load_metrics
        if names is not None and not len(self._tasks):
            self._tasks.spawn(self._read(names), name="read the server's load")

    async def close(self) -> None:
        await self._tasks.close()

    async def _read(self, names: LoadMetrics) -> None:
        before = self._num_sent()
        try:
            metrics = await self._upstream.metrics()
        except ParrotError as error:
            self._num_failures += 1
            if self._num_failures == _MAX_FAILURES and self.latest is not None:
                logger.warning("the server's load is not known any more: %s", error.message)
                self._set(None)
            return
        self._num_failures = 0
        # What came or went meanwhile must not look like another's.
        num_sent = max(before, self._num_sent())
        kv_tokens = self._upstream.capabilities.kept_tokens or 0
        self._set(read_load(metrics, names, num_sent, kv_tokens))

    def _set(self, load: ServerLoad | None) -> None:
        if load != self.latest:
            self.latest = load
            self._on_read(load)
