"""A session with the REST client, for tests that do not use the front end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import CallParameter, SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.serve_client import ServeClient


@dataclass(frozen=True)
class Program:
    client: ServeClient
    session_id: int
    session_auth: str

    async def call(
        self,
        template: str,
        max_gen_length: int = 16,
        inputs: dict[str, str] | None = None,
        variables: dict[str, str] | None = None,
        output: str = "out",
        **options: Any,
    ) -> str:
        """Submit a call with one output, and return the id of the output. `inputs` are values;
        `variables` are ids. Repeated calls run again unless `reuse` is given."""
        parameters = [CallParameter(name=k, value=v) for k, v in (inputs or {}).items()]
        parameters += [CallParameter(name=k, var_id=v) for k, v in (variables or {}).items()]
        sampling = SamplingConfig(temperature=0.0, max_gen_length=max_gen_length)
        parameters.append(CallParameter(name=output, is_output=True, sampling_config=sampling))
        response = await self.client.semantic_call(
            SemanticCallRequest(
                session_id=self.session_id,
                session_auth=self.session_auth,
                template=template,
                parameters=parameters,
                **({"reuse": False} | options),
            )
        )
        return next(p.var_id for p in response.param_info if p.is_output)

    async def get(self, var_id: str, timeout_s: float | None = 30.0) -> str:
        return await self.client.get_var(
            self.session_id,
            self.session_auth,
            var_id,
            criteria=PerformanceCriteria.LATENCY,
            timeout_s=timeout_s,
        )

    def stream(self, var_id: str, timeout_s: float | None = 30.0) -> AsyncIterator[str]:
        return self.client.stream_var(
            self.session_id, self.session_auth, var_id, timeout_s=timeout_s
        )

    async def cancel(self, var_id: str) -> None:
        await self.client.cancel_var(self.session_id, self.session_auth, var_id)


@asynccontextmanager
async def program(client: ServeClient) -> AsyncIterator[Program]:
    session = await client.create_session()
    yield Program(client, session.session_id, session.session_auth)
    await client.delete_session(session.session_id, session.session_auth)
