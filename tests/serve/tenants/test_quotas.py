"""Quotas of sessions and tenants: requests are rejected at the limit, and not before."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from parrot.gateway.vendors.errors import anthropic_error, openai_error
from parrot.protocol.errors import Cancelled, ClusterFull, QueueFull, QuotaExceeded
from parrot.protocol.public import NativeCallRequest, SemanticCallRequest, SessionCreateRequest
from parrot.serve.config import SessionQuota, TenantQuota
from parrot.serve.core import ServeCore
from parrot.serve.graph.nodes import NativeCall
from parrot.serve.tenants.limits import QueuedByTenant, Quota, require_share
from tests.support.held_world import HeldWorld
from tests.support.requests import given, made, var_ids

KEYS = ("one", "two", "three")


class BusySandbox:
    """A sandbox whose calls run until the test ends them."""

    def __init__(self) -> None:
        self.running: list[NativeCall] = []
        self.cancelled: list[NativeCall] = []
        self.release = asyncio.Event()

    async def evaluate(self, call: NativeCall) -> Sequence[object]:
        self.running.append(call)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(call)
            raise
        return ["done" for _ in call.results]

    async def close(self) -> None: ...


class Tenant(HeldWorld):
    """A session of a tenant."""

    def native(self, output: str = "out", **fields: Any) -> str:
        body = {"func_name": "f", "func_source": "def f(): pass", "parameters": [made(output)]}
        request = NativeCallRequest.model_validate(self.scope | body | fields)
        return var_ids(self.core.submit_native(request))[output]

    def run(self, num_calls: int) -> None:
        for n in range(num_calls):
            self.call(f"y{n}", output_criteria="latency")


async def tenants(
    sandbox: BusySandbox | None = None, keys: Sequence[str | None] = KEYS, **config: Any
) -> list[Tenant]:
    """Create a session for each key. Calls stay queued until an engine joins by `join`."""
    first = await Tenant.open(tasks_capacity=0, sandbox=sandbox, **config)
    first.core.delete_session(*first.scope.values())
    worlds = [Tenant(first.core, first.engine, first.clock) for _ in keys]
    for world, key in zip(worlds, keys, strict=True):
        world.enter(key)
    return worlds


async def test_a_large_read_of_one_tenant_leaves_others_their_share_of_the_queue() -> None:
    greedy, other, third = await tenants(global_scheduler={"max_queue_size": 8})
    parts = [greedy.call(f"part{n}") for n in range(20)]
    later = other.call("later")
    reading = greedy.read(greedy.call("sum", *parts))
    await asyncio.sleep(0)
    assert greedy.core.num_queued == 20
    with pytest.raises(QueueFull, match=r"`max_queue_size`: 8; 20 of these calls are yours"):
        greedy.call("more")
    other.run(3)
    fourth = other.read(later)  # two tenants have queued work, so a share is 4 tasks
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        other.call("fifth")
    third.run(2)  # now a share is 8 // 3 tasks
    with pytest.raises(QueueFull):
        third.call("third")
    with pytest.raises(QueueFull):
        await greedy.read(greedy.call("y", idempotency_key="k"))
    for read in (reading, fourth):
        read.cancel()
    await asyncio.sleep(0)
    other.run(1)  # the queued calls of the large read were removed
    await greedy.core.close()


async def test_the_queue_admits_no_more_tenants_than_its_size() -> None:
    keys = [f"key {n}" for n in range(4)]
    worlds = await tenants(keys=keys, global_scheduler={"max_queue_size": 3})
    for world in worlds[:3]:
        world.run(1)
    with pytest.raises(QueueFull):
        worlds[3].call("y")
    await worlds[0].core.close()


def test_usage_after_the_end_of_a_session_does_not_count() -> None:
    """For example, the time of a native function that ends after its session does not count."""
    tenant = Quota(TenantQuota())
    ended, other = (Quota(SessionQuota(), tenant) for _ in range(2))
    for session in (ended, other):
        session.add(sessions=1, native_ms=1)
    ended.close()
    ended.add(native_ms=1000)
    assert tenant.used == other.used == {"sessions": 1, "native_ms": 1}


def test_shares_of_a_full_queue_are_weighted() -> None:
    queued = QueuedByTenant(light=25, heavy=75, other=3)
    weigh = {"light": 1.0, "heavy": 2.0, "other": 1.0}.__getitem__
    for tenant, is_refused in (("light", True), ("heavy", True), ("other", False)):
        with pytest.raises(ClusterFull) if is_refused else nullcontext() as caught:
            require_share(tenant, 100, weigh, 7.0, queued)
        assert caught is None or caught.value.retry_after_s == 7.0
    queued["heavy"] = 49
    require_share("heavy", 100, weigh, 7.0, queued)


def test_a_light_tenant_may_queue_one_task_and_made_up_tenants_are_limited() -> None:
    queued = QueuedByTenant(heavy=100)
    weigh = {"light": 1.0, "heavy": 1000.0}.__getitem__
    require_share("light", 100, weigh, None, queued)
    queued.enter("light")
    with pytest.raises(ClusterFull):
        require_share("light", 100, weigh, None, queued)
    made_up = QueuedByTenant({f"tenant {n}": 1 for n in range(100)})
    with pytest.raises(ClusterFull):
        require_share("one more", 100, lambda tenant: 1.0, None, made_up)


def test_vendor_errors_for_a_full_cluster_and_for_a_quota_differ() -> None:
    full, quota = ClusterFull("full"), QuotaExceeded("yours")
    status, body = openai_error(full)
    assert (status, body["error"]["type"], body["error"]["code"]) == (
        *(503, "server_error"),
        "overloaded",
    )
    assert openai_error(quota)[0] == 429
    status, body = anthropic_error(full)
    assert (status, body["error"]["type"]) == (503, "overloaded_error")
    assert anthropic_error(quota)[0] == 429


async def test_waiting_native_calls_count_as_queued_tasks() -> None:
    sandbox = BusySandbox()
    one, two, _ = await tenants(sandbox, native_workers=1, global_scheduler={"max_queue_size": 4})
    for n in range(4):
        one.native(f"n{n}", output_criteria="latency")
    await asyncio.sleep(0)  # the first call uses the worker
    one.run(1)
    with pytest.raises(QueueFull):
        one.native()
    two.native(output_criteria="latency")
    two.run(1)
    with pytest.raises(QueueFull):
        two.native()
    sandbox.release.set()
    for _ in range(20):
        await asyncio.sleep(0)
    one.native()
    await one.core.close()


async def test_a_cancelled_native_call_stops_in_its_sandbox() -> None:
    sandbox = BusySandbox()
    (world,) = await tenants(sandbox, keys=[None])
    out = world.native()
    reading = world.read(out)
    await asyncio.sleep(0.01)
    assert len(sandbox.running) == 1
    world.core.cancel_var(*world.scope.values(), out)
    with pytest.raises(Cancelled):
        await reading
    await asyncio.sleep(0)
    assert sandbox.cancelled == sandbox.running
    await world.core.close()


async def test_calls_and_their_idempotency_keys_are_limited() -> None:
    (world,) = await tenants(keys=[None], session_quota={"calls": 3})
    for n in range(3):
        world.call(f"y{n}", idempotency_key=f"key {n}")
    for submit in (world.call, world.native):
        with pytest.raises(QuotaExceeded, match=r"more than 3 calls \(`session_quota\.calls`\)"):
            submit("y")
    assert len(await var_ids_of(world)) == 3
    world.call("y1", idempotency_key="key 1")  # returns the first answer
    assert len(await var_ids_of(world)) == 3
    await world.core.close()


async def test_all_ways_to_create_variables_are_limited() -> None:
    (world,) = await tenants(keys=[None], session_quota={"variables": 4})
    x = world.variable("x", "text")
    world.call("y", x)
    request = SemanticCallRequest.model_validate(
        world.scope
        | {
            "template": "{{a}}{{b}}{{y}}",
            "parameters": [given("a", "1"), given("b", "2"), made("y")],
        }
    )
    with pytest.raises(QuotaExceeded, match=r"session_quota\.variables"):
        world.core.submit_call(request)
    world.variable("z")
    world.call("w", x)
    with pytest.raises(QuotaExceeded, match=r"session_quota\.variables"):
        world.variable("one too many")
    assert len(await var_ids_of(world)) == 4
    await world.core.close()


async def test_bytes_of_text_are_limited_and_outputs_count() -> None:
    (world,) = await tenants(keys=[None], session_quota={"text_bytes": 23})
    x = world.variable("x")
    with pytest.raises(QuotaExceeded, match=r"23 bytes of text \(`session_quota\.text_bytes`\)"):
        world.core.set_var(*world.scope.values(), x, "é" * 11 + "!!")
    world.core.set_var(*world.scope.values(), x, "é" * 2)
    reading = world.read(world.call("y"))  # its template has 8 characters
    await asyncio.sleep(0)
    await world.join()
    await world.settle()
    await world.finish("y", "an output of 22 bytes.")
    assert await reading == "an output of 22 bytes.", "existing values are kept"
    with pytest.raises(QuotaExceeded):
        world.variable("z", "!")
    world.variable("empty", "")
    await world.core.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"template": "x" * 50 + "{{y}}"},
        {"system": "x" * 50, "chat": True},
        {"models": ["x" * 50]},
        {"parameters": [made("y", regex="x" * 50)]},
        {"parameters": [made("y", json_schema={"enum": ["x" * 50]})]},
        {"parameters": [made("y"), given("x", "x" * 50)]},
    ],
)
async def test_everything_that_a_call_stores_is_counted(fields: dict[str, Any]) -> None:
    (world,) = await tenants(keys=[None], session_quota={"text_bytes": 50})
    body = {"template": "a{{y}}", "parameters": [made("y")]}
    world.core.submit_call(SemanticCallRequest.model_validate(world.scope | body))
    request = SemanticCallRequest.model_validate(world.scope | body | fields)
    with pytest.raises(QuotaExceeded, match="text_bytes"):
        world.core.submit_call(request)
    await world.core.close()


async def test_names_of_apps_are_counted_and_a_rejected_session_is_not() -> None:
    first, _ = await tenants(keys=["one", "two"], tenant_quota={"text_bytes": 10})
    for api_key in ("one", "three"):
        with pytest.raises(QuotaExceeded, match="text_bytes"):
            first.core.create_session(SessionCreateRequest(api_key=api_key, apps=["x" * 11]))
    first.core.create_session(SessionCreateRequest(api_key="one", apps=["x" * 10]))
    with pytest.raises(QuotaExceeded):
        first.variable("x", "!")
    await first.core.close()


async def test_a_tenants_sessions_share_its_quota_and_others_have_their_own() -> None:
    first, second, stranger = await tenants(keys=["one", "one", "two"], tenant_quota={"calls": 3})
    first.call("a")
    first.call("b")
    second.call("c")
    for session in (first, second):
        with pytest.raises(QuotaExceeded, match=r"the tenant .*tenant_quota\.calls"):
            session.call("d")
    stranger.call("e")
    first.core.delete_session(*first.scope.values())
    second.call("d")
    second.call("e")
    with pytest.raises(QuotaExceeded):
        second.call("f")
    await first.core.close()


async def test_made_up_keys_share_one_series_of_the_metrics() -> None:
    worlds = await tenants(keys=[f"made up {n}" for n in range(50)] + [None])
    for world in worlds:
        world.run(1)
    core = worlds[0].core
    await worlds[0].join()
    await worlds[0].settle()
    for _ in worlds:
        await worlds[0].finish("y0")
    series = tenant_series(core)
    assert len(series) == 6  # three directions each for "public" and for all others
    assert 'parrot_tenant_tokens_total{direction="prompt",tenant="other"}' in " ".join(series)
    await core.close()


async def test_each_configured_tenant_has_its_own_series() -> None:
    worlds = await tenants(keys=("one", "two"), api_keys=KEYS)
    core = worlds[0].core
    await worlds[0].join()
    for world in worlds:
        world.run(1)
        await world.settle()
        await world.finish("y0")
    assert len(tenant_series(core)) == 6
    assert "other" not in "".join(tenant_series(core))
    await core.close()


def tenant_series(core: ServeCore) -> list[str]:
    return [
        line.rpartition(" ")[0]
        for line in b"".join(core.metrics()).decode().splitlines()
        if line.startswith("parrot_tenant_tokens_total{")
    ]


async def var_ids_of(world: HeldWorld) -> list[str]:
    listed = await world.core.list_vars(*world.scope.values())
    return [info.var_id for info in listed.vars]
