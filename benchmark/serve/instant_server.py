"""A server with OpenAI's API that answers immediately: the floor for servers behind Parrot.

    python -m benchmark.serve.instant_server PORT

It reports itself as vLLM. A request gets `max_tokens` words, one per event, `TOKEN_S` apart. Other
requests get other words, so that no result cache answers the calls that depend on them."""

import argparse
import asyncio
import zlib
from typing import Any

import orjson
from aiohttp import web

TOKEN_S = 0.006  # Seconds between two tokens, as on a GPU.
MODEL = "instant"


async def _models(request: web.Request) -> web.Response:
    card = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 131_072}
    return web.json_response({"object": "list", "data": [card]})


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


async def _answer(request: web.Request) -> web.StreamResponse:
    raw = await request.read()
    body, word = orjson.loads(raw), f" word{zlib.crc32(raw)}"
    is_chat = request.path.endswith("/chat/completions")
    count = body["max_tokens"]
    common = {"id": "x", "object": "chunk", "created": 1, "model": MODEL}
    usage = {"prompt_tokens": 1000, "completion_tokens": count, "total_tokens": 1000 + count}
    if not body.get("stream"):
        text = word * count
        told = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choice = {"index": 0, **told, "finish_reason": "length"}
        return web.json_response({**common, "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    told = {"delta": {"content": word}} if is_chat else {"text": word}
    choice = {"index": 0, **told, "finish_reason": None}
    event = _event({**common, "choices": [choice]})
    last = _event({**common, "choices": [choice | {"finish_reason": "length"}]})
    for _ in range(count - 1):
        await response.write(event)
        await asyncio.sleep(TOKEN_S)
    await response.write(last + _event({**common, "choices": [], "usage": usage}))
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    app = web.Application()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/completions", _answer)
    app.router.add_post("/v1/chat/completions", _answer)
    web.run_app(app, host="127.0.0.1", port=parser.parse_args().port, print=None)


if __name__ == "__main__":
    main()
