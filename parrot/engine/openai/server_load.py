"""Reads the load of a foreign server, which may also serve other clients."""

import logging
import math
import re
from collections.abc import Callable, Iterator

from parrot.engine.openai.dialects import LoadMetrics
from parrot.engine.openai.upstream import Upstream
from parrot.protocol.engine_api import ServerLoad
from parrot.protocol.errors import ParrotError
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3  # Consecutive failures after which the last known load is dropped.
_MAX_REQUESTS = 10**6  # Upper bound for a reported number of requests.
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_START_TIME = "process_start_time_seconds"
_SAMPLE = re.compile(r"^([\w:]+)(?:\{([^}\n]*)\})? ([^\s]+)", re.MULTILINE)


def read_load(
    metrics: str, names: LoadMetrics, num_sent: int, kv_tokens: int = 0
) -> ServerLoad | None:
    """Read the load from the text of `/metrics`. None if the number of running requests is missing.

    `num_sent`: this engine's own requests in the server. `kv_tokens`: size of the server's KV
    cache in tokens, 0 if unknown."""
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
    """Yield name, replica and value of each wanted series. A replica can have several series of one
    name, for example one per rank. The caller takes the largest."""
    for name, labels, text in _SAMPLE.findall(metrics):
        if name in wanted:
            try:
                value = float(text)
            except ValueError:
                continue
            if math.isfinite(value) and value >= 0:
                yield name, dict(_LABEL.findall(labels)).get(label, ""), value


def _first(found: dict[str, dict[str, float]], names: tuple[str, ...]) -> list[float]:
    """The values of all replicas for the first name that the metrics contain."""
    return next((list(found[name].values()) for name in names if name in found), [])


class LoadWatch:
    """Reads the server's load on request, one reading at a time. `latest` is the newest load. It is
    None before the first reading and after three consecutive failures."""

    def __init__(
        self,
        upstream: Upstream,
        num_sent: Callable[[], int],
        on_read: Callable[[ServerLoad | None], None],
    ) -> None:
        """`num_sent` returns the number of this engine's requests in the server. `on_read` receives
        each new value of `latest`."""
        self._upstream = upstream
        self._num_sent = num_sent
        self._on_read = on_read
        self._tasks = TaskSet()
        self._num_failures = 0
        self._started_at: float | None = None  # Of the server's process, in Unix time.
        self.latest: ServerLoad | None = None
        self.server_restarted = False

    def begin(self) -> None:
        """Start a reading. No effect while one is running, or if the server has no load metrics."""
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
                logger.warning("the load of the server is no longer known: %s", error.message)
                self._set(None)
            return
        self._num_failures = 0
        self._note_start(metrics)
        # Take the larger number, so that own requests that began or finished during the reading do
        # not count as requests of other clients.
        num_sent = max(before, self._num_sent())
        kv_tokens = self._upstream.capabilities.kept_tokens or 0
        self._set(read_load(metrics, names, num_sent, kv_tokens))

    def _note_start(self, metrics: str) -> None:
        """A server with several processes reports no start time, or several. These are ignored."""
        starts = [value for _, _, value in _samples(metrics, {_START_TIME}, "")]
        if len(starts) == 1:
            self.server_restarted |= self._started_at not in (None, starts[0])
            self._started_at = starts[0]

    def _set(self, load: ServerLoad | None) -> None:
        if load != self.latest:
            self.latest = load
            self._on_read(load)
