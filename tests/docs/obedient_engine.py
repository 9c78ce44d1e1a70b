"""A fake engine whose outputs match the constraints of a request."""

import json
import re
from collections.abc import AsyncGenerator
from typing import Any

from parrot.protocol.engine_api import GenerateRequest, GenerateResponse, StreamChunk
from parrot.protocol.sampling import SamplingConfig
from tests.support.fake_engine import FakeEngine, Script, fake_engine

MATCHES = ("1843", "2026-11-22", "yes")  # Outputs for the regular expressions on the pages.


class ObedientEngine(FakeEngine):
    """A fake engine that returns the `choices` of an output in turn."""

    num_choices = 0

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse, None]:
        answer = self.constrained(request.sampling_config)
        if answer is not None:
            self.scripts.insert(0, Script(text=lambda _: answer))
        async for event in super().generate_stream(request):
            yield event

    def constrained(self, config: SamplingConfig) -> str | None:
        """Return a valid output, or None without constraints."""
        if config.choices:
            self.num_choices += 1
            return config.choices[(self.num_choices - 1) % len(config.choices)]
        if config.regex:
            return next(text for text in MATCHES if re.fullmatch(config.regex, text))
        if config.json_schema is not None:
            schema = config.json_schema
            return json.dumps(instance(json.loads(schema) if isinstance(schema, str) else schema))
        return None


def instance(schema: dict[str, Any], definitions: dict[str, Any] | None = None) -> Any:
    """Return a simple valid value for a schema. Supports the keywords that the pages use."""
    known = definitions or schema.get("$defs", {})
    if "$ref" in schema:
        return instance(known[schema["$ref"].rpartition("/")[2]], known)
    kind = schema.get("type")
    if "enum" in schema:
        return schema["enum"][0]
    if kind == "object":
        return {key: instance(part, known) for key, part in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance(schema["items"], known)]
    simple: dict[Any, Any] = {"string": "a text", "integer": 3, "number": 0.5, "boolean": True}
    return simple[kind]


def obedient_engine() -> ObedientEngine:
    made = fake_engine("e0", model="embedded")
    return ObedientEngine(
        made.info,
        made.tokenizer_response,
        Script(text=lambda prompt: f"A text after {len(prompt)} characters.", steps=2),
    )
