"""Limits on calls in flight and on rates."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.protocol.errors import QueueFull, RateLimited
from parrot.serve.config import CoreConfig
from parrot.serve.tenants.limits import Meters
from parrot.serve.tenants.table import TenantTable
from tests.serve.tenants.keys import entry, write_keys
from tests.support.manual_clock import ManualClock


def metered(folder: str | Path, clock: ManualClock, **limits: int) -> Meters:
    """Meters with one tenant, `a`, with these limits."""
    path = write_keys(Path(folder) / "keys.json", entry("a", "k", limits=limits), entry("b", "l"))
    return Meters(TenantTable(CoreConfig(keys_file=path)), clock)


def test_calls_in_flight(tmp_path: Path) -> None:
    meters = metered(tmp_path, ManualClock(), calls_in_flight=2)
    meters.began(1, "a", 0)
    meters.admit("a")
    with meters.running("a", 0):
        with pytest.raises(QueueFull, match=r"2 calls in flight \(`limits.calls_in_flight`\)"):
            meters.admit("a")
        meters.admit("b")
        meters.ended(1, 0)
        meters.ended(1, 0)
        meters.admit("a")
    meters.check_integrity()


async def test_requests_are_replenished_over_time(tmp_path: Path) -> None:
    clock = ManualClock()
    meters = metered(tmp_path, clock, requests_per_minute=30)
    for _ in range(30):
        meters.admit("a")
    for wait_s in (2.0, 2.0):
        for _ in range(3):
            with pytest.raises(RateLimited, match=r"30 .*limits\.requests_per_minute") as caught:
                meters.admit("a")
            assert caught.value.retry_after_s == pytest.approx(wait_s)
        await clock.advance(wait_s)
        meters.admit("a")
    await clock.advance(1e6)
    for _ in range(30):
        meters.admit("a")
    with pytest.raises(RateLimited):
        meters.admit("a")


def test_the_estimated_charge_is_corrected_at_the_end(tmp_path: Path) -> None:
    meters = metered(tmp_path, ManualClock(), tokens_per_minute=100)
    meters.began(1, "a", 150)
    with pytest.raises(RateLimited, match="tokens_per_minute") as caught:
        meters.admit("a")
    assert caught.value.retry_after_s == pytest.approx(51 * 0.6)
    meters.ended(1, 20)
    meters.admit("a")
    meters.began(2, "a", 10)
    meters.ended(2, 200)
    with pytest.raises(RateLimited) as caught:
        meters.admit("a")
    assert caught.value.retry_after_s == pytest.approx(121 * 0.6)
    assert not meters.counts_tokens("b")
    meters.began(3, "b", 10**9)
    meters.admit("b")


@given(
    st.lists(st.tuples(st.floats(0, 120), st.integers(0, 400), st.integers(0, 400)), max_size=40),
    st.integers(1, 1000),
)
def test_no_tenant_exceeds_the_rate_for_long(
    calls: list[tuple[float, int, int]], per_minute: int
) -> None:
    """In a sequence of calls, only the last one may exceed the tokens that were available so
    far."""

    async def play(folder: str) -> None:
        clock = ManualClock()
        meters = metered(folder, clock, tokens_per_minute=per_minute)
        used = 0
        for number, (pause_s, expected, actual) in enumerate(calls):
            await clock.advance(pause_s)
            came = per_minute * (1 + clock.now() / 60)
            try:
                meters.admit("a")
            except RateLimited as error:
                await clock.advance((error.retry_after_s or 0) + 1e-6)
                meters.admit("a")
                came = per_minute * (1 + clock.now() / 60)
            assert used <= came + 1e-6
            meters.began(number, "a", expected)
            meters.ended(number, actual)
            used += actual
        meters.check_integrity()

    with TemporaryDirectory() as folder:
        asyncio.run(play(folder))
