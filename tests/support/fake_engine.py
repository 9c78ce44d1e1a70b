"""An engine inside the test process: an `EngineClient` that keeps contexts as sequences and answers
by a script."""

import asyncio
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from struct import pack
from typing import Any

import pytest
from tokenizers import Tokenizer

from parrot.protocol.engine_api import (
    NO_PARENT,
    Capabilities,
    EmbedRequest,
    EmbedResponse,
    EngineInfo,
    EngineType,
    FillPiece,
    FillRequest,
    FillResponse,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    RuntimeInfo,
    ScoreRequest,
    ScoreResponse,
    StreamChunk,
    TokenizerResponse,
    Usage,
)
from parrot.protocol.engine_client import EngineClient, OnChunk
from parrot.protocol.errors import NotFound, ParrotError
from parrot.protocol.http import HttpClient
from parrot.protocol.registration_client import RegistrationClient
from parrot.protocol.sampling import DefaultSampling, Logprobs
from parrot.utils.byte_symbols import byte_symbols
from parrot.utils.ids import new_token
from tests.support.byte_tokenizer import CHATML, byte_tokenizer, tokenizer_id_of

Contents = list[Any]  # Token ids or characters.


@dataclass
class Script:
    """The engine's reaction to a request."""

    text: Callable[[str], str] = lambda prompt: f"<{len(prompt)}>"  # From the prompt to the output.
    error: ParrotError | None = None
    steps: int = 3  # Number of chunks of a stream.
    hang_after: int | None = None  # Number of chunks before the engine waits for `resume`.
    finish_reason: FinishReason = FinishReason.STOP
    stop_token: bool = True  # The ids end with the EOS token.
    extra_ids: Sequence[int] = ()
    stop_string: str | None = None


@dataclass
class FakeEngine(EngineClient):
    """An engine that uses each of `scripts` once, in order, and then `script`."""

    info: EngineInfo
    tokenizer_response: TokenizerResponse | None = None
    script: Script = field(default_factory=Script)
    scripts: list[Script] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)
    embedded: list[EmbedRequest] = field(default_factory=list)
    scored: list[ScoreRequest] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # The whole prompt of each request.
    freed: list[int] = field(default_factory=list)
    free_batches: int = 0
    free_error: ParrotError | None = None
    ping_error: ParrotError | None = None
    contexts: dict[int, Contents] = field(default_factory=dict)  # Those that are not freed.
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    num_aborted: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    num_followed: int = 0
    chunks: "defaultdict[int, asyncio.Queue[StreamChunk | None]]" = field(
        default_factory=lambda: defaultdict(asyncio.Queue)
    )

    def __post_init__(self) -> None:
        payload = self.tokenizer_response
        self._codec = None if payload is None else Tokenizer.from_str(payload.tokenizer_json)

    async def close(self) -> None:
        self.is_closed = True

    async def tokenizer(self) -> TokenizerResponse:
        assert self.tokenizer_response is not None
        return self.tokenizer_response

    async def ping(self) -> RuntimeInfo:
        if self.ping_error is not None:
            raise self.ping_error
        return RuntimeInfo()

    async def incarnation(self) -> str:
        await self.ping()
        return self.info.incarnation

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        self.free_batches += 1
        if self.free_error is not None:
            raise self.free_error
        self.freed.extend(context_ids)
        return sum(len(self.contexts.pop(context_id, ())) for context_id in context_ids)

    async def fill(self, request: FillRequest) -> FillResponse:
        cached = self._fill([request])
        contents = self.contexts[request.context_id]
        return FillResponse(
            filled_len=len(contents) - cached,
            cached_tokens=cached,
            computed_tokens=len(contents) - cached,
        )

    async def embed(self, request: EmbedRequest) -> EmbedResponse:
        """Vectors that contain the lengths of their inputs."""
        self.embedded.append(request)
        await self._begin_reading()
        lengths = [len(given) for given in request.inputs]
        vectors = [pack("<3f", n, 0.5, -1.0) for n in lengths]
        embeddings = [b64encode(vector).decode() for vector in vectors]
        return EmbedResponse(embeddings=embeddings, prompt_tokens=sum(lengths))

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        """Fixed log probabilities, as for outputs."""
        self.scored.append(request)
        await self._begin_reading()
        answer = ScoreResponse(logprobs=[])
        for given in request.inputs:
            text = given if isinstance(given, str) else ""
            ids = [] if isinstance(given, str) else given
            found = made_up(request.num_top, ids, text, self._codec)
            answer.prompt_tokens += len(found)
            first = Logprobs(found.width, tokens=found.tokens)
            first.add([found.ids[0], *[-1] * request.num_top], [0.0] * found.width)
            first.extend(found.part(1))
            answer.logprobs.append(first)
        return answer

    async def _begin_reading(self) -> None:
        script = self.scripts.pop(0) if self.scripts else self.script
        try:
            if script.error is not None:
                raise script.error
            await self._maybe_hang(script, 0)
        except asyncio.CancelledError:
            self.num_aborted += 1
            self.aborted.set()
            raise

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        async with aclosing(self.generate_stream(request)) as events:
            async for event in events:
                if isinstance(event, GenerateResponse):
                    return event
                if on_chunk is not None:
                    on_chunk(event)
        raise AssertionError("no result")

    async def follow(self, context_id: int) -> AsyncGenerator[StreamChunk, None]:
        self.num_followed += 1
        while (chunk := await self.chunks[context_id].get()) is not None:
            yield chunk

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse, None]:
        self.requests.append(request)
        self.asked.set()
        script = self.scripts.pop(0) if self.scripts else self.script
        try:
            if script.error is not None:
                raise script.error
            cached = self._fill(request.fills)
            contents = self.contexts[request.context_id]
            self.prompts.append(self._decode(contents))
            text = script.text(self.prompts[-1])
            size = max(1, -(-len(text) // script.steps))
            num_filled = len(contents)
            for i, start in enumerate(range(0, len(text), size)):
                await self._maybe_hang(script, i)
                chunk = text[start : start + size]
                ids = self._encode(chunk)
                contents.extend(ids if self._codec else chunk)
                logprobs = scores(request, ids, chunk, self._codec)
                event = StreamChunk(ids=ids, text=chunk, logprobs=logprobs)
                self.chunks[request.context_id].put_nowait(event)
                yield event
            await self._maybe_hang(script, script.steps)
            yield self._finish(request, script, text, num_filled - cached, cached)
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            self.aborted.set()
            raise

    async def cancel_after_requests(
        self, asking: Coroutine[Any, Any, object], num_requests: int = 1
    ) -> None:
        """Cancel `asking` after it has sent `num_requests` requests to this engine."""
        task = asyncio.create_task(asking)
        until = len(self.requests) + num_requests
        while len(self.requests) < until:
            self.asked.clear()
            await self.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def all_aborted(self) -> None:
        """Wait until all requests are aborted."""
        while self.num_aborted < len(self.requests):
            self.aborted.clear()
            await self.aborted.wait()

    async def _maybe_hang(self, script: Script, num_chunks: int) -> None:
        if script.hang_after == num_chunks:
            await self.resume.wait()
        else:
            await asyncio.sleep(0)

    def _fill(self, fills: Sequence[FillPiece]) -> int:
        cached = 0
        for piece in fills:
            contents = self.contexts.get(piece.context_id)
            if contents is None:
                if piece.parent_context_id != NO_PARENT:
                    parent = self.contexts.get(piece.parent_context_id)
                    if parent is None:
                        raise NotFound(f"no context {piece.parent_context_id}")
                    assert piece.parent_len is None or piece.parent_len <= len(parent)
                    contents = parent[: piece.parent_len]
                    cached = len(contents)
                else:
                    contents = []
                self.contexts[piece.context_id] = contents
            contents.extend(piece.token_ids or piece.text or ())
        return cached

    def _finish(
        self, request: GenerateRequest, script: Script, text: str, computed: int, cached: int
    ) -> GenerateResponse:
        """The contents already have the text. This adds the tokens after it."""
        contents = self.contexts.get(request.context_id, [])
        ids = self._encode(text)
        num_text_ids = len(ids)
        ids += script.extra_ids
        if self.tokenizer_response is not None:
            ids += self.tokenizer_response.special_ids.eos[:1] if script.stop_token else []
        contents.extend(ids[num_text_ids:])
        usage = Usage(cached_tokens=cached, computed_tokens=computed, output_tokens=len(ids))
        return GenerateResponse(
            generated_text=text,
            generated_ids=ids,
            finish_reason=script.finish_reason,
            stop_string=script.stop_string,
            usage=usage,
            logprobs=scores(request, ids, text, self._codec),
        )

    def _encode(self, text: str) -> list[int]:
        if self._codec is None:
            return []
        return list(self._codec.encode(text, add_special_tokens=False).ids)

    def _decode(self, contents: Contents) -> str:
        if self._codec is None:
            return "".join(map(str, contents))
        return str(self._codec.decode(contents, skip_special_tokens=False))


def scores(
    request: GenerateRequest, ids: Sequence[int], text: str, codec: Tokenizer | None
) -> Logprobs | None:
    """Log probabilities for the output, or None if the request wants none. See `made_up`."""
    num_top = request.sampling_config.logprobs
    return None if num_top is None else made_up(num_top, ids, text, codec)


def made_up(num_top: int, ids: Sequence[int], text: str, codec: Tokenizer | None) -> Logprobs:
    """Log probabilities that depend only on each token's byte (0 for other tokens). The likely
    tokens are that byte and the bytes after it. The value of a byte is -(byte % 8) / 8. An engine
    without tokens has no `ids`."""
    id_of = [i if codec is None else codec.token_to_id(s) for i, s in enumerate(byte_symbols())]
    byte_of = {number: byte for byte, number in enumerate(id_of)}
    table = [bytes([byte]) for byte in range(256)] if codec is None else None
    found = Logprobs(1 + num_top, tokens=table)
    for number in ids or text.encode():
        byte = byte_of.get(number, 0)
        likely = [(byte + i) % 256 for i in range(num_top)]
        found.add([number, *[id_of[b] for b in likely]], [-(b % 8) / 8 for b in [byte, *likely]])
    return found


def fake_engine(
    name: str = "fake", *, model: str = "tiny", text: bool = False, add_bos: bool = False,
    tokens_capacity: int = 100_000, tasks_capacity: int = 64, max_seq_len: int = 50_000,
    script: Script | None = None, ping_error: ParrotError | None = None,
    chat_template: str = CHATML, capabilities: Capabilities | None = None,
) -> FakeEngine:  # fmt: skip
    payload = None if text else byte_tokenizer(add_bos=add_bos, chat_template=chat_template)
    info = EngineInfo(
        engine_type=EngineType.SIM,
        engine_name=name,
        model=model,
        architecture="" if text else "LlamaForCausalLM",
        tokenizer_id=None if payload is None else tokenizer_id_of(payload),
        host="127.0.0.1",
        port=9001,
        max_seq_len=max_seq_len,
        tasks_capacity=tasks_capacity,
        tokens_capacity=tokens_capacity,
        capabilities=capabilities or Capabilities(),
        default_sampling=None if text else DefaultSampling(temperature=0.5, top_k=0),
        incarnation=new_token(),
    )
    return FakeEngine(info, payload, script or Script(), ping_error=ping_error)


async def register(url: str, engine: FakeEngine) -> None:
    """Register the engine with the ServeCore at `url`."""
    async with HttpClient(url) as http:
        await RegistrationClient(http).register_engine(engine.info)
