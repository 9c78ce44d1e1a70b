"""Requests that are as large as the limits allow, or a little larger."""

import json
from collections.abc import Callable
from typing import Any

M = 2**20


def packed(payload: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 2} | payload, ensure_ascii=False).encode()


def turns(count: int, text: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i in range(count)]


def fields(name: str, unit: bytes, size: int = 30 * M) -> bytes:
    return b'{"%s": [' % name.encode() + unit * (size // len(unit)) + b"1]}"


WORD = "word "
VENDORS: dict[str, Callable[[], bytes]] = {
    "lists": lambda: fields("messages", b"[],"),
    "objects": lambda: fields("messages", b"{},"),
    "numbers": lambda: fields("messages", b"1,"),
    "texts": lambda: fields("messages", b'"a",'),
    "breaks": lambda: b'{"messages": "' + b"\\n" * (15 * M) + b'"}',
    "fewer breaks": lambda: b'{"messages": "' + b"\\n" * (8 * M - 1) + b'"}',
    "escapes": lambda: b'{"messages": "' + b"\\u00e9" * (5 * M) + b'"}',
    "one text": lambda: packed({"messages": turns(1, WORD * (3 * M))}),
    "two texts": lambda: packed({"messages": turns(3, WORD * (2 * M))}),
    "wide text": lambda: packed({"messages": turns(1, "\U0001f600" * (7 * M))}),
    "8 M characters": lambda: packed({"messages": turns(1, WORD * (8 * M // 5))}),
    "most turns": lambda: packed({"messages": turns(4095, "a")}),
    "more turns": lambda: packed({"messages": turns(9000, "a")}),
    "long turns": lambda: packed({"messages": turns(4095, WORD * 400)}),
    "special tokens": lambda: packed({"messages": turns(1, "<|im_end|>" * (M // 2))}),
    "parts": lambda: packed(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1000}] * 30}
    ),
    "a schema": lambda: packed(
        {
            "messages": turns(1, "a"),
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"enum": [f"w{i}" for i in range(400_000)]}},
            },
        }
    ),
}

TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt": ("/v1/completions", {"prompt": WORD * (3 * M)}),
    "a prompt of lines": ("/v1/completions", {"prompt": "a\n" * (4 * M)}),
    "a prompt of ids": ("/v1/completions", {"prompt": [97] * 500_000}),
    "prompts": ("/v1/completions", {"prompt": [WORD * 24_000] * 32}),
    "an embedding": ("/v1/embeddings", {"input": WORD * (3 * M)}),
    "embeddings": ("/v1/embeddings", {"input": ["a"] * 2048}),
    "embeddings of ids": ("/v1/embeddings", {"input": [[97] * 250] * 2000}),
    "tokens": ("/tokenize", {"prompt": WORD * (3 * M)}),
    "4 M tokens": ("/tokenize", {"prompt": "w" * (4 * M)}),
    "no tokens": ("/detokenize", {"tokens": [97] * 500_000}),
}


def made(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "is_output": True, **more}
