"""`POST /v1/chat/completions`: a turn, and its answers as chat completions or their chunks."""

import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any

import orjson

from parrot.protocol.errors import ParrotError
from parrot.protocol.public import VarGetResponse
from parrot.protocol.server import Event
from parrot.serve.api.vendors.choices import read_all, stream_all
from parrot.serve.api.vendors.endpoint import Caller
from parrot.serve.api.vendors.openai_chat import ChatRequest, template_messages, template_options
from parrot.serve.api.vendors.openai_common import Json, program_of, usage_of
from parrot.serve.api.vendors.openai_errors import openai_error
from parrot.serve.turns import Turn, TurnRequest, Turns
from parrot.utils.ids import new_token


class ChatCompletions:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def create(
        self, request: ChatRequest, caller: Caller
    ) -> Awaitable[bytes] | AsyncGenerator[Event]:
        max_tokens = request.max_completion_tokens or request.max_tokens
        turn = self._turns.submit(
            TurnRequest(
                tenant=caller.tenant,
                model=request.model,
                prompt=template_messages(request.messages),
                samplings=request.samplings(max_tokens),
                options=template_options(request),
                program=program_of(request, caller),
                criteria=request.criteria,
            )
        )
        frame = {
            "id": f"chatcmpl-{new_token()}",
            "created": int(time.time()),
            "model": request.model,
        }
        if request.stream:
            return self._chunks(turn, frame, request)
        return self._whole(turn, frame)

    async def _whole(self, turn: Turn, frame: Json) -> bytes:
        answers = await read_all([turn])
        choices = []
        for i, answer in enumerate(answers):
            message = {"role": "assistant", "content": answer.content}
            self._turns.remember(turn, i, message)
            choices.append(
                {
                    "index": i,
                    "message": message | {"refusal": None},
                    "logprobs": None,
                    "finish_reason": answer.finish_reason,
                }
            )
        usage = usage_of(answers, len(answers))
        return orjson.dumps(
            frame | {"object": "chat.completion", "choices": choices, "usage": usage}
        )

    async def _chunks(self, turn: Turn, frame: Json, request: ChatRequest) -> AsyncGenerator[Event]:
        frame = frame | {"object": "chat.completion.chunk"}
        options = request.stream_options
        if options is not None and options.include_usage:
            frame["usage"] = None
        begun: set[int] = set()
        answers: list[VarGetResponse] = []
        try:
            async with aclosing(stream_all([turn])) as deltas:
                async for choice, delta in deltas:
                    if choice not in begun:
                        begun.add(choice)
                        yield None, _chunk(frame, choice, {"role": "assistant", "content": ""})
                    if isinstance(delta, str):
                        yield None, _chunk(frame, choice, {"content": delta})
                        continue
                    answers.append(delta)
                    message = {"role": "assistant", "content": delta.content}
                    self._turns.remember(turn, choice, message)
                    yield None, _chunk(frame, choice, {}, delta.finish_reason)
            if options is not None and options.include_usage:
                yield None, frame | {"choices": [], "usage": usage_of(answers, len(answers))}
        except ParrotError as error:
            if not begun:
                raise
            yield None, openai_error(error)[1]
        yield None, "[DONE]"


def _chunk(
    frame: Json, choice: int, delta: Mapping[str, Any], finish_reason: str | None = None
) -> Json:
    fields = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return frame | {"choices": [fields]}
