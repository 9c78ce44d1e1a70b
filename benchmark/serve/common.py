"""What the benchmarks of the simulated service share: texts, settings and sessions."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.results import ROOT
from parrot.engine.config import SimConfig
from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.public import SemanticCallRequest
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.simulation import PATIENT

ENGINES = ROOT / "sample_configs" / "engine"
LETTERS = "abcdefghijklmnopqrstuvwxyz      "


def words(draw: random.Random, size: int) -> str:
    """A text of so many letters; a letter is a token of a `sim` engine."""
    return "".join(draw.choices(LETTERS, k=size))


def core_config(**scheduler: Any) -> CoreConfig:
    """A ServeCore that waits for ever, with these keys of its global scheduler."""
    settings = GlobalSchedulerConfig.model_validate(scheduler)
    return PATIENT.model_copy(update={"global_scheduler": settings})


def sim_engine(path: Path) -> SimConfig:
    return SimConfig.model_validate_json(path.read_text())


class Data(str):
    """A text that a call gets as an input, instead of having it in its template."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Var:
    """A semantic variable, and the request of the call that it is the output of, if it is one."""

    id: str
    request_id: int | None = None


class Session:
    """One session of a simulated program."""

    def __init__(self, client: ServeClient, scope: Mapping[str, Any]) -> None:
        self.client = client
        self.scope = scope

    @classmethod
    async def begin(cls, client: ServeClient) -> "Session":
        return cls(client, (await client.create_session()).model_dump())

    async def call(
        self,
        prompt: Sequence[str | Data | Var],
        tokens: int,
        *,
        sampling: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Var:
        """Submit a call with one output of at most `tokens`. `options`: fields of the request."""
        template, parameters = "", []
        for number, piece in enumerate(prompt):
            if isinstance(piece, Data | Var):
                name = f"i{number}"
                given = {"var_id": piece.id} if isinstance(piece, Var) else {"value": str(piece)}
                parameters.append({"name": name, **given})
                piece = f"{{{{{name}}}}}"
            template += piece
        limits = {"max_gen_length": tokens} | dict(sampling or {})
        parameters.append({"name": "out", "is_output": True, "sampling_config": limits})
        body = {**self.scope, "template": template + "{{out}}", "parameters": parameters, **options}
        response = await self.client.semantic_call(SemanticCallRequest.model_validate(body))
        return Var(response.param_info[-1].var_id, response.request_id)

    async def create(self, name: str, content: str | None = None) -> Var:
        return Var(await self.client.create_var(**self.scope, var_name=name, content=content))

    async def set(self, var: Var, content: str) -> None:
        await self.client.set_var(**self.scope, var_id=var.id, content=content)

    async def read(
        self, var: Var, criteria: PerformanceCriteria = PerformanceCriteria.LATENCY
    ) -> str:
        return await self.client.get_var(**self.scope, var_id=var.id, criteria=criteria)

    async def stream(self, var: Var) -> tuple[float, float]:
        """Read piece by piece; returns when the first and the last one came."""
        now = asyncio.get_running_loop().time
        arrived = [now() async for _ in self.client.stream_var(**self.scope, var_id=var.id)]
        return arrived[0], arrived[-1]

    async def end(self) -> None:
        await self.client.delete_session(**self.scope)
