"""A ServeCore with scripted answers, to record and replay vendors' clients.

The answers depend on the end of the prompt only, so a replay gets the recorded answers."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from parrot.protocol.engine_api import GenerateRequest, GenerateResponse, RegisterRequest
from parrot.protocol.engine_api import StreamChunk as Chunk
from parrot.serve.config import CoreConfig, SessionQuota
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.utils.clock import MonotonicClock
from tests.gateway.test_transcript import HERMES
from tests.support.fake_engine import FakeEngine, Script, fake_engine

MODEL = "tiny"
KEY = "right-key"
MAX_TEXT = 100_000
_SHELLS = {  # the tools with which agents run commands
    "run_shell_command": {"command": "echo hi", "description": "Says hi", "is_background": False},
    "Bash": {"command": "echo hi", "description": "Says hi"},
    "bash": {"command": "echo hi", "description": "Says hi"},
    "exec_command": {"cmd": "echo hi"},
    "shell": {"command": ["echo", "hi"]},
}
_CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class ScriptedEngine(FakeEngine):
    """An engine with scripted answers. The event `hung` is set when the first request hangs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hung = asyncio.Event()

    async def _maybe_hang(self, script: Script, num_chunks: int) -> None:
        if script.hang_after == num_chunks:
            self.hung.set()
        await super()._maybe_hang(script, num_chunks)

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Chunk | GenerateResponse, None]:
        given = self._decode([id_ for piece in request.fills for id_ in piece.token_ids or ()])
        hang_after = 1 if "Hang on." in given else 0 if "Hang." in given else None
        script = Script(text=answer, hang_after=hang_after, steps=5)
        self.scripts.insert(0, script)
        async for event in super().generate_stream(request):
            yield event


def answer(prompt: str) -> str:
    """Return a scripted answer about Paris, or a tool call if the prompt asks for the weather."""
    asked = prompt.split("<|im_start|>user\n")[-1]
    if "<tool_response>" in asked:
        return "The tool said: " + asked.split("\n")[1][:60]
    if "echo hi" in asked:
        for tool in _SHELLS:
            if f'"name": "{tool}"' in prompt:
                return _CALL.format(name=tool, arguments=json.dumps(_SHELLS[tool]))
    if "weather" in asked and (tool := re.search(r'"name": ?"(\w*weather\w*)"', prompt)):
        return _CALL.format(name=tool[1], arguments='{"city": "Paris"}')
    if "Think first" in asked:
        return "<think>\nOf France, so Paris.\n</think>\n\nParis."
    if "answer in JSON" in asked:
        return '{"city": "Paris"}'
    if "[[ ## completed ## ]]" in asked:
        return "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"
    return "Paris is the capital of France."


@asynccontextmanager
async def scripted_core(
    max_text: int = MAX_TEXT,
) -> AsyncIterator[tuple[ServeCore, ScriptedEngine]]:
    """Run a ServeCore with a scripted engine. Prompts above `max_text` bytes get status 429."""
    config = CoreConfig(
        api_keys=(KEY,),
        cluster_token="token",
        engine_heartbeat_timeout=3600,  # this engine sends no heartbeats
        session_quota=SessionQuota(text_bytes=max_text),
    )
    made = fake_engine(
        "e0", model=MODEL, chat_template=HERMES, max_seq_len=10**6, tokens_capacity=10**7
    )
    engine = ScriptedEngine(made.info, made.tokenizer_response)
    clock = MonotonicClock()
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda info: engine))
    await core.register_engine(RegisterRequest(engine_config=engine.info))
    yield core, engine
