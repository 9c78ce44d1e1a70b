"""What servers count themselves, in Prometheus' text format."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from parrot.cli.bench.program import Backend

Counters = Mapping[str, float]
Scrape = Callable[[], Awaitable[str]]
"""Gives a server's metrics page; "" if it has none."""


@dataclass(frozen=True, slots=True)
class CountedBackend(Backend):
    """One whose server counts."""

    scrape: Scrape

    async def counters(self) -> Counters:
        """What the server has counted since it began."""
        return read_counters(await self.scrape())


EAGER_TOKENS = "parrot_eager_fill_tokens_total outcome=filled"

_WANTED = (
    "parrot_kv_",
    "parrot_eager_",
    "parrot_calls_reused",
    "parrot_call_retries",
    "vllm:prefix_cache",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
)
_TOTAL = "_total"


def read_counters(page: str) -> Counters:
    """Those that say something of a run, by "name label=value ..."."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(_WANTED) and sample.name.endswith(_TOTAL):
                labels = [f"{name}={value}" for name, value in sorted(sample.labels.items())]
                found[" ".join([sample.name, *labels])] = sample.value
    return found


def total(counters: Counters, name: str) -> float:
    """The sum over the labels that `name` leaves open; it may end with the first of them."""
    return sum(value for key, value in counters.items() if key.startswith(name))


def growth(before: Counters, after: Counters) -> dict[str, float]:
    """What has been counted in between, without what has not changed."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value}


def scrape(base_url: str, token: str | None = None) -> Scrape:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def get() -> str:
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{base_url}/metrics") as response,
        ):
            return await response.text() if response.ok else ""

    return get
