"""Clusters, and a program that produces samples of every series."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from parrot.engine.app import ReorderBuffer
from parrot.engine.app import create_app as create_engine_app
from parrot.engine.config import SimConfig
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.http import HttpClient
from parrot.protocol.public import NativeCallRequest, SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.simulation import PATIENT, SimCluster, run_virtual
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app

if TYPE_CHECKING:
    from parrot.engine.traces import EngineTracer

T = TypeVar("T")
SOURCE = "def join(a: P.Input, b: P.Output):\n    b.set(a + '!')\n"


def semantic(scope: dict[str, Any], name: str, text: str, **inputs: dict[str, str]) -> Any:
    out = {"name": "out", "is_output": True, "sampling_config": {"max_gen_length": 5}}
    given = [{"name": key, **value} for key, value in inputs.items()]
    holes = "".join(f"{{{{{key}}}}}" for key in inputs)
    body = {"template": f"{text} {holes} {{{{out}}}}", "parameters": [*given, out]}
    return SemanticCallRequest.model_validate(scope | body | {"func_name": name})


def native(scope: dict[str, Any], name: str, var_id: str) -> NativeCallRequest:
    parameters = [{"name": "a", "var_id": var_id}, {"name": "b", "is_output": True}]
    body = {"func_name": name, "func_source": SOURCE, "parameters": parameters}
    return NativeCallRequest.model_validate(scope | body)


async def write_and_review(client: ServeClient, apps: list[str]) -> dict[str, Any]:
    """write -> join (native) -> review. Returns the session's scope."""
    scope = (await client.create_session(apps=apps)).model_dump()
    text = await client.semantic_call(semantic(scope, "write", "Write it.", topic={"value": "sea"}))
    joined = await client.native_call(native(scope, "join", text.param_info[-1].var_id))
    reviewed = await client.semantic_call(
        semantic(scope, "review", "Review it.", essay={"var_id": joined.param_info[-1].var_id})
    )
    await client.get_var(**scope, var_id=reviewed.param_info[-1].var_id)
    return scope


def in_cluster(body: Callable[[SimCluster], Awaitable[T]], **config: Any) -> T:
    """Run `body` in virtual time in a cluster of two engines; `config` are ServeCore's keys."""

    async def main() -> T:
        core = CoreConfig.model_validate(dict(PATIENT) | config)
        async with SimCluster(2, engine=SimConfig(model="m"), core=core) as cluster:
            return await body(cluster)

    return run_virtual(main())


@asynccontextmanager
async def over_http(
    core: ServeCore,
    tracer: "EngineTracer | None" = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[ServeClient]:
    """`core` and an engine on sockets. `headers` go with every request of the client."""
    config = SimConfig(model="m", host="127.0.0.1")
    service = SimService(config)
    await service.start()
    app = create_engine_app(service, ReorderBuffer(MonotonicClock()), config, "", tracer)
    async with (
        serve_app(app) as engine_url,
        serve_app(create_app(core)) as url,
        HttpClient(url, headers=headers) as http,
    ):
        port = int(engine_url.rpartition(":")[2])
        info = service.engine_info().model_copy(update={"port": port})
        await core.register_engine(RegisterRequest(engine_config=info))
        yield ServeClient(http)
        await core.close()
    await service.close()
