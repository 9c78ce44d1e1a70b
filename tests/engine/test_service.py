"""The fields of a request that the service passes to the core."""

from collections.abc import Callable
from typing import Any

import pytest

from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import BACKGROUND, EngineRequest, Sink
from parrot.engine.core.output import Language
from parrot.engine.service import RunnerService
from parrot.engine.sim import SimRunner, byte_tokenizer_response
from parrot.protocol.engine_api import FillRequest, GenerateRequest
from parrot.protocol.errors import Cancelled
from tests.support.manual_clock import ManualClock

CONFIG = SimConfig()


class RefusingCore:
    """Replaces the core. Records each request and rejects it."""

    def __init__(self) -> None:
        self.requests = self
        self.seen: list[EngineRequest] = []

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        self.seen.append(request)
        sink(Cancelled("seen"))

    def abort(self, request_id: int) -> None: ...


class RefusingDriver:
    is_lost = False

    def __init__(self) -> None:
        self.core = RefusingCore()

    async def start(self) -> EngineCore:
        language = Language.of(byte_tokenizer_response())
        clock = ManualClock()
        return EngineCore(CONFIG, SimRunner(CONFIG.instance, clock), language, clock)

    def post(self, verb: Callable[[Any], None]) -> None:
        verb(self.core)

    async def close(self) -> None: ...


async def submitted(request: FillRequest | GenerateRequest) -> EngineRequest:
    driver = RefusingDriver()
    service = RunnerService(CONFIG, driver, warm_up=False)
    await service.start()
    is_fill = isinstance(request, FillRequest)
    with pytest.raises(Cancelled, match="seen"):
        await (service.fill(request) if is_fill else service.generate(request))
    return driver.core.seen[0]


async def test_a_request_keeps_its_tenant_and_its_priority() -> None:
    fields = {"context_id": 1, "priority": 7, "cache_salt": "tenant"}
    fill = await submitted(FillRequest(**fields, token_ids=[5]))
    generate = await submitted(GenerateRequest(**fields, fills=[{"token_ids": [5]}]))
    for request in (fill, generate):
        assert (request.priority, request.cache_salt) == (7, "tenant")
        assert list(request.pieces[0].token_ids) == [5]
    assert fill.sampling is None
    assert generate.sampling is not None


async def test_a_background_fill_has_the_lowest_priority_and_keeps_its_share() -> None:
    request = FillRequest(context_id=1, token_ids=[5], background=True, background_share=0.07)
    wanted = await submitted(request)
    assert (wanted.priority, wanted.background_share) == (BACKGROUND, 0.07)
