"""One engine of the cluster, as an engine client of ServeCore. KV is tracked exactly; the time of
steps is modelled."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from parrot.engine.config import SimConfig
from parrot.engine.sim import byte_tokenizer_response
from parrot.protocol.engine_api import (
    EngineInfo,
    EngineType,
    FillRequest,
    FillResponse,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    RuntimeInfo,
    StepCosts,
    TokenizerResponse,
    Usage,
)
from parrot.protocol.engine_client import EngineClient, OnChunk
from parrot.protocol.errors import Unavailable
from parrot.protocol.transport import Unreachable
from tests.scale.simulated.blocks import BlockPool
from tests.scale.simulated.device import Device, Job

_TOKENIZER = byte_tokenizer_response()
_TOKENIZER_ID = hashlib.sha256(_TOKENIZER.tokenizer_json.encode()).hexdigest()
_LETTERS = b"the output of a simulated engine, of as many letters as it was asked for; " * 64


@dataclass(slots=True)
class Counts:
    """Tokens of prompts and outputs, and requests, since the engine's start."""

    cached: int = 0
    computed: int = 0
    output: int = 0
    requests: int = 0


def engine_info(config: SimConfig, name: str) -> EngineInfo:
    instance = config.instance
    capacity = instance.num_kv_cache_blocks * instance.block_size
    return EngineInfo(
        engine_type=EngineType.SIM,
        engine_name=name,
        model=config.model,
        tokenizer_id=_TOKENIZER_ID,
        host=name,
        port=1,
        max_seq_len=min(instance.max_seq_len, capacity),
        tasks_capacity=config.scheduler.max_batch_size,
        tokens_capacity=capacity,
        block_size=instance.block_size,
        costs=StepCosts(
            step_s=instance.step_s,
            sequence_s=instance.sequence_s,
            token_s=instance.context_token_s,
            prefill_s=instance.prefill_token_s,
        ),
        incarnation=name,
    )


class ModelledEngine(EngineClient):
    """Outputs have the maximum length and are not streamed. Prompts are computed in order of
    arrival. `kill` has the effect of a process that dies."""

    def __init__(self, config: SimConfig) -> None:
        instance = config.instance
        self.pool = BlockPool(instance.num_kv_cache_blocks, instance.block_size)
        self.device = Device(instance)
        self.counts = Counts()
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[Job, None] = {}
        self._is_dead = False

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        self._is_dead = True
        for job in list(self._jobs):
            self.device.drop(job)
            if not job.ended.done():
                job.ended.set_exception(Unavailable("the engine is dead"))

    def forget(self) -> None:
        """Free all contexts after ServeCore has ended. Their blocks can still be reused."""
        assert not self._jobs, "the ended ServeCore still has running calls"
        self.pool.free_all()

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        self._require_alive()
        new = cached = 0
        for piece in request.fills:
            added, known = self.pool.extend(piece, request.cache_salt)
            new, cached = new + added, cached + known
        num_output = request.sampling_config.max_gen_length
        prompt = self.pool.length(request.context_id)
        reserved = self.pool.reserve(num_output)
        try:
            await self._compute(prompt, new - cached, num_output)
        finally:
            self.pool.unreserve(reserved)
        start = request.task_id % 64
        text = _LETTERS[start : start + num_output]
        if len(text) < num_output:
            text = (text * (num_output // len(text) + 1))[:num_output]
        self.pool.append(request.context_id, text)
        self._count(cached, new - cached, num_output)
        return GenerateResponse(
            generated_text=text.decode(),
            generated_ids=list(text),
            finish_reason=FinishReason.LENGTH,
            usage=Usage(
                cached_tokens=cached, computed_tokens=new - cached, output_tokens=num_output
            ),
        )

    async def fill(self, request: FillRequest) -> FillResponse:
        self._require_alive()
        new, cached = self.pool.extend(request, request.cache_salt)
        await self._compute(self.pool.length(request.context_id), new - cached, 0)
        self._count(cached, new - cached, 0)
        return FillResponse(filled_len=new, cached_tokens=cached, computed_tokens=new - cached)

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        self._require_alive()
        return sum(map(self.pool.free, context_ids))

    async def ping(self) -> RuntimeInfo:
        self._require_alive()
        return self.runtime_info()

    async def tokenizer(self) -> TokenizerResponse:
        return _TOKENIZER

    def runtime_info(self) -> RuntimeInfo:
        return RuntimeInfo(
            num_max_blocks=self.pool.num_blocks,
            num_free_blocks=max(0, self.pool.num_free),
            block_size=self.pool.block_size,
            num_running_jobs=len(self._jobs),
            num_steps=int(self.device.num_steps),
        )

    async def _compute(self, prompt: int, to_compute: int, output: int) -> None:
        job = Job(prompt, to_compute, output, self._loop.create_future())
        self._jobs[job] = None
        self.device.add(job)
        try:
            await job.ended
        except asyncio.CancelledError:
            self.device.drop(job)
            raise
        finally:
            del self._jobs[job]

    def _count(self, cached: int, computed: int, output: int) -> None:
        counts = self.counts
        counts.cached += cached
        counts.computed += computed
        counts.output += output
        counts.requests += 1

    def _require_alive(self) -> None:
        if self._is_dead:
            raise Unreachable("the engine is dead")
