"""Journeys: the functions that run between a request and its answer. A profiler counts them.

The journeys of ServeCore run on virtual time with simulated engines, and all optional features are
off. The journey of the builtin engine runs the embedded model in real time. The second request of
each kind is measured, because the first creates objects that later ones share.

    python -m tests.journey [NAME...]      lists the functions of each journey by module
"""

import asyncio
import dataclasses
import enum
import gc
import importlib
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pydantic
import torch

import parrot
from parrot.engine import engine_types
from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import BuiltinConfig
from parrot.engine.engine_types import create_service
from parrot.engine.runner import load
from parrot.protocol.engine_api import FillPiece, GenerateRequest
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.public import CallParameter, SemanticCallRequest, SessionCreateResponse
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.serve_client import ServeClient
from parrot.protocol.transport import App
from parrot.simulation import SimCluster, run_virtual
from parrot.simulation.links import DistantTransport, lan
from parrot.utils.clock import MonotonicClock
from tests.support.plain_sampling import PLAIN_SAMPLING

_PACKAGE = str(Path(parrot.__file__).parent) + "/"
_SETTLED_S = 5.0  # Virtual seconds after which all work that follows a request has ended.
_NUM_TOKENS = 20

# The simulation, small containers and clocks. They can be understood without the request path.
_NOT_COUNTED = ("simulation/", "engine/sim", "utils/")


@dataclass(slots=True)
class Passed:
    """The calls of one journey to Python functions of the package, by file and by function, in the
    order of the first call, and the classes of the objects whose methods were called. `files` are
    all files. The other fields leave out the files and the classes of `_NOT_COUNTED`."""

    files: set[str] = field(default_factory=set)
    modules: Counter[str] = field(default_factory=Counter)
    functions: Counter[tuple[str, str]] = field(default_factory=Counter)
    classes: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    def count(self, frame: types.FrameType) -> None:
        """Count a call of the frame's function."""
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            return
        module = file.removeprefix(_PACKAGE)
        self.files.add(module)
        if module.startswith(_NOT_COUNTED):
            return
        function = (module, frame.f_code.co_qualname)
        self.modules[module] += 1
        self.functions[function] += 1
        kind = type(frame.f_locals.get("self"))
        if kind.__module__.startswith("parrot.") and _is_counted(kind.__module__):
            self.classes.setdefault((kind.__module__, kind.__qualname__), function)

    @property
    def stateful(self) -> list[tuple[str, str]]:
        """(module, class) of the objects that can change."""
        return [name for name in self.classes if is_stateful(*name)]

    @property
    def num_calls(self) -> int:
        return self.modules.total()


class Profiler:
    """Reports function calls to the journey that is being measured, if any. Sees the measuring
    thread, and threads that were started after `install`."""

    def __init__(self) -> None:
        self.passed: dict[str, Passed] = {}
        self._current: Passed | None = None

    def __call__(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and self._current is not None:
            self._current.count(frame)

    def install(self) -> None:
        """Report calls of threads that start from now on."""
        threading.setprofile(self)

    def unprofiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that is not part of a journey, to run it without profiling. Profiling
        doubles the time of a function."""

        def called(*args: Any) -> Any:
            sys.setprofile(None)
            try:
                return function(*args)
            finally:
                sys.setprofile(self)

        return called

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self._current = self.passed[name] = Passed()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._current = None


def _is_counted(module: str) -> bool:
    """Whether the classes of a module count. A counted file may define a method that a class of
    another file inherits."""
    return not module.removeprefix("parrot.").replace(".", "/").startswith(_NOT_COUNTED)


def is_stateful(module: str, name: str) -> bool:
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        if part == "<locals>":
            return True
        kind = getattr(kind, part)
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:
        return False
    return not issubclass(kind, tuple | enum.Enum | BaseException | pydantic.BaseModel)


async def serve_journeys(profiler: Profiler) -> list[str]:
    """Measure the journeys of ServeCore, and return the borrowed methods of the cluster."""
    async with SimCluster(num_engines=2) as cluster:
        client, wire = cluster.client(), DistantTransport(cluster.app, lan())
        session = await client.create_session()
        await _call(client, session, 0)
        await asyncio.sleep(_SETTLED_S)
        with profiler.measure("semantic_call"):
            await _call(client, session, 1)
            await asyncio.sleep(_SETTLED_S)
        model = (await wire.request("GET", "/v1/models"))["data"][0]["id"]
        await _chat(wire, model, 0)
        await asyncio.sleep(_SETTLED_S)
        with profiler.measure("chat_stream"):
            await _chat(wire, model, 1)
            await asyncio.sleep(_SETTLED_S)
        with profiler.measure("registration"):
            await cluster.add_engine()
            await asyncio.sleep(1.0)
        with profiler.measure("create_session"):
            await client.create_session()
        return borrowed_methods()


async def _call(client: ServeClient, session: SessionCreateResponse, number: int) -> None:
    """Submit a call and read its output."""
    answer = await client.semantic_call(
        SemanticCallRequest(
            session_id=session.session_id,
            session_auth=session.session_auth,
            func_name="f",
            template="Tell me about {{x}} now: {{y}}",
            parameters=[
                CallParameter(name="x", value=f"cats and dogs {number} " * 20, is_output=False),
                CallParameter(
                    name="y", is_output=True, sampling_config={"max_gen_length": _NUM_TOKENS}
                ),
            ],
        )
    )
    output = next(parameter for parameter in answer.param_info if parameter.is_output)
    await client.get_var(session.session_id, session.session_auth, output.var_id)


async def _chat(wire: DistantTransport, model: str, number: int) -> None:
    body = {
        "model": model,
        "stream": True,
        "max_tokens": _NUM_TOKENS,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"hello {number}"},
        ],
    }
    async for _ in wire.stream("POST", "/v1/chat/completions", body=body):
        pass


async def engine_journey(profiler: Profiler) -> None:
    """Measure a request to the embedded model, with one thread and without KV in CPU memory.

    The journey must be the same on every machine. So it runs without compiled kernels, which are
    ready only some seconds after the first start, and without kernels that need AVX512."""
    config = BuiltinConfig.model_validate(
        {
            "engine_type": "builtin",
            "engine_name": "journey",
            "model": "embedded",
            "device": "cpu",
            "serve_core": {"host": "localhost", "port": 9000},
            "instance": {"host_kv_gb": 0, "num_kv_cache_blocks": 256},
            **PLAIN_SAMPLING,
        }
    )
    service = create_service(config)
    with (
        patch.object(engine_types, "_load_model", profiler.unprofiled(engine_types._load_model)),
        patch.object(load, "_compiled_layers", return_value=None),
        patch.object(torch.backends.cpu, "get_cpu_capability", return_value="DEFAULT"),
    ):
        await service.start()
    app: App = create_app(service, ReorderBuffer(MonotonicClock()), config, "journey")
    client = EngineClient(DistantTransport(app, lan()))
    try:
        await client.generate(_prompt(0))
        await asyncio.sleep(0.5)  # The engine's thread may not sleep yet.
        with profiler.measure("engine_call"):
            await client.generate(_prompt(1))
            await client.free_contexts([1])
    finally:
        await client.close()
        await service.close()


def _prompt(number: int) -> GenerateRequest:
    piece = FillPiece(context_id=number, token_ids=[1, *range(100 + number, 160)])
    sampling = SamplingConfig(max_gen_length=_NUM_TOKENS, ignore_tokenizer_eos=True)
    return GenerateRequest(context_id=number, fills=[piece], sampling_config=sampling)


def borrowed_methods() -> list[str]:
    """Return the public attributes that are methods of other objects. Callers should use the other
    objects directly."""
    found = set()
    for owner in gc.get_objects():
        if _is_ours(owner) and hasattr(owner, "__dict__"):
            for name, value in vars(owner).items():
                if _is_method_of_another(value, owner) and not name.startswith("_"):
                    found.add(f"{type(owner).__qualname__}.{name} is {value.__qualname__}")
    return sorted(found)


def _is_method_of_another(value: object, owner: object) -> bool:
    return (
        isinstance(value, types.MethodType)
        and value.__self__ is not owner
        and _is_ours(value.__self__)
    )


def _is_ours(thing: object) -> bool:
    return str(type(thing).__module__).startswith("parrot.")


def measured() -> tuple[dict[str, Passed], list[str]]:
    """Return all journeys by name, and the borrowed methods of a cluster."""
    profiler = Profiler()
    profiler.install()
    try:
        borrowed = run_virtual(serve_journeys(profiler))
        asyncio.run(engine_journey(profiler))
    finally:
        threading.setprofile(None)
    return profiler.passed, borrowed
