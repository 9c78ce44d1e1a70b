"""Field types of requests. Each text, list, object and number has a bound. Requests use only these
types, `Literal` and enumerations (tests/hostile/test_field_bounds.py)."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import (
    Field,
)

MAX_TEXT = 16 * 2**20  # Characters in one template or value.
MAX_TOKENS = 2**25  # Ids in one list. About the number that fits in a body.
BOUNDED_BY_BODY = Field(json_schema_extra={"x-bound": "body"})
"""Marks fields that are only limited with the body: by `max_body_size` in bytes, and by `JsonMeter`
(bodies.py) in the number of values."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
Label = Annotated[str, Field(max_length=256)]  # A name, or empty.
ForeignId = Annotated[str, Field(max_length=2**14)]  # From another API. May contain signatures.
Path = Annotated[str, Field(max_length=4096)]  # Of a model or its tokenizer.
Credential = Annotated[str, Field(max_length=4096)]
Traceparent = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
BodyText = Annotated[str, BOUNDED_BY_BODY]
JsonObject = Annotated[dict[str, Any], BOUNDED_BY_BODY]
AnyJson = Annotated[Any, BOUNDED_BY_BODY]

Id = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[int, Field(ge=0, le=2**53)]  # Exact in JSON parsers that use doubles.
Positive = Annotated[int, Field(ge=1, le=2**53)]
Quantity = Annotated[float, Field(ge=0.0, le=2.0**53, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]


class PerformanceCriteria(StrEnum):
    """The goal of a read. `LATENCY`: the whole value soon. `THROUGHPUT`: many values at low cost.
    `TTFT`: short time to the first token. `TPOT`: short time per output token."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    TTFT = "TTFT"
    TPOT = "TPOT"

    @classmethod
    def _missing_(cls, value: object) -> "PerformanceCriteria | None":
        """Accept any letter case on the wire ("ttft", "Latency")."""
        if isinstance(value, str):
            return next((c for c in cls if c.value.lower() == value.lower()), None)
        return None
