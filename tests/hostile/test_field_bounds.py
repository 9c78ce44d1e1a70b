"""Every field of every request to either server has a bound. An error names the field."""

import math
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError
from starlette.routing import BaseRoute

from parrot.engine.app import ReorderBuffer
from parrot.engine.app import create_app as engine_app
from parrot.engine.config import SimConfig
from parrot.engine.sim import SimService
from parrot.gateway.page.endpoints import EnterRequest
from parrot.protocol.endpoint import Endpoint, PathParameters
from parrot.protocol.fields import BodyText, JsonObject
from parrot.protocol.sampling import MAX_STOP_STRINGS
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app as core_app
from parrot.utils.clock import MonotonicClock
from tests.gateway.vendors.conftest import MODEL, Site, core_config, site

__all__ = ["core_config", "site"]  # fixtures

Json = dict[str, Any]
READ_BY_HAND = {"/": None, "/ui/api/enter": EnterRequest, "/ui/api/leave": None, "/ui": None}


def routes() -> list[BaseRoute]:
    config, clock = SimConfig(engine_name="e", model="m"), MonotonicClock()
    engine = engine_app(SimService(config), ReorderBuffer(clock), config)
    return [*core_app(ServeCore(CoreConfig())).routes, *engine.routes]


def models() -> list[type[BaseModel]]:
    """Return the models of all requests."""
    found: dict[type[BaseModel], None] = {PathParameters: None}
    for route in routes():
        endpoint = getattr(route, "endpoint", None)
        by_hand = READ_BY_HAND.get(getattr(route, "path", ""), PathParameters)
        taken = endpoint.takes if isinstance(endpoint, Endpoint) else by_hand
        if taken is not None:
            found[taken] = None
    return list(found)


class Walk:
    """Finds the fields without a bound in the schema of one model."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._schema = model.model_json_schema()
        self._seen: set[str] = set()
        self._name = model.__name__

    def unbounded(self) -> list[str]:
        return list(self._all(self._schema, self._name))

    def _all(self, schema: Json, place: str) -> Iterator[str]:
        if schema.get("x-bound") == "body" or "enum" in schema or "const" in schema:
            return
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in self._seen:
                self._seen.add(name)
                yield from self._all(self._schema["$defs"][name], name)
        elif several := [
            one for kind in ("anyOf", "oneOf", "allOf") for one in schema.get(kind, ())
        ]:
            for one in several:
                yield from self._all(one, place)
        else:
            yield from self._plain(schema, place)

    def _plain(self, schema: Json, place: str) -> Iterator[str]:
        kind = schema.get("type")
        for bounds in {
            "string": (("maxLength",),),
            "array": (("maxItems",),),
            "integer": (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")),
            "number": (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")),
            "object": () if schema.get("additionalProperties") is False else (("maxProperties",),),
            "boolean": (),
            "null": (),
        }.get(str(kind), (("type",),)):
            is_ours = kind == "object" and "properties" in schema  # models ignore unknown fields
            if not schema.keys() & set(bounds) and not (
                is_ours and "additionalProperties" not in schema
            ):
                yield f"{place}: no {' or '.join(bounds)}"
        items = [schema[key] for key in ("items", "additionalProperties") if key in schema]
        for item in (*items, *schema.get("prefixItems", ())):
            if isinstance(item, dict):
                yield from self._all(item, f"{place}[]")
        for name, field in schema.get("properties", {}).items():
            yield from self._all(field, f"{place}.{name}")


def test_every_field_of_every_request_has_a_bound() -> None:
    found = models()
    assert len(found) > 30
    assert [place for model in found for place in Walk(model).unbounded()] == []


def test_the_check_finds_fields_without_a_bound() -> None:
    class Inner(BaseModel):
        deep: list[Annotated[list[str], Field(max_length=2)]] = Field([], max_length=3)

    class Outer(BaseModel):
        text: str | None
        few: list[int] = Field(max_length=3)
        many: list[Inner]
        keys: dict[str, bool]
        some: dict[str, float] = Field(max_length=3)
        anything: Any
        number: float = Field(ge=0)
        good: BodyText | JsonObject | Annotated[int, Field(gt=0, lt=3)] | None

    assert {place.partition(":")[0] for place in Walk(Outer).unbounded()} == {
        *("Outer.text", "Outer.few[]", "Outer.many", "Inner.deep[][]", "Outer.keys"),
        *("Outer.some[]", "Outer.anything", "Outer.number"),
    }


def beyond(schema: Json) -> Iterator[Any]:
    """Yield values outside the bounds of a field, if the field has one type (or null)."""
    kinds = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    if len(kinds) != 1:
        return
    (one,) = kinds
    match one.get("type"):
        case "string" if "maxLength" in one and "enum" not in one:
            yield "x" * (one["maxLength"] + 1)
        case "array" if one.get("maxItems", 2**30) < 2**17:
            yield [None] * (one["maxItems"] + 1)
        case "object" if "maxProperties" in one:
            yield {str(number): None for number in range(one["maxProperties"] + 1)}
        case "integer" | "number":
            yield 2 * one["maximum"] + 1 if "maximum" in one else one["exclusiveMaximum"]
            yield one["minimum"] - 1 if "minimum" in one else one["exclusiveMinimum"]
            yield from ("nan", "inf", "-inf", math.nan, math.inf, 10**4000)


def test_a_field_beyond_its_bound_is_rejected_by_name() -> None:
    num_checked = 0
    for model in models():
        for name, field in model.model_json_schema()["properties"].items():
            for value in beyond(field):
                with pytest.raises(ValidationError) as refusal:
                    model.model_validate({name: value})
                named = {str(error["loc"][0]) for error in refusal.value.errors() if error["loc"]}
                assert name in named or "" in named, (model, name, value)
                num_checked += 1
    assert num_checked > 300


async def test_the_error_of_a_vendor_endpoint_names_the_field(site: Site) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    for name, value in {
        "stop": ["x"] * (MAX_STOP_STRINGS + 1),
        "max_tokens": 10**9,
        "seed": -(10**19),
        "logit_bias": {"1": 1000},
        "parrot": {"session_id": -1},
        "user": "x" * 5000,
    }.items():
        status, answer = await site.send("/v1/chat/completions", chat | {name: value})
        if name == "user":
            assert status == 200
            continue
        assert status == 400, answer
        assert answer["error"]["param"].startswith(name), answer
