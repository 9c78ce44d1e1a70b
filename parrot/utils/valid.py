"""Payloads from fields that are known to be valid."""

from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


def of_valid(kind: type[M], **fields: Any) -> M:
    """An instance with these fields, which are not validated. Instances share the defaults of the
    other fields. It is faster than `model_construct`, which visits all fields of the model."""
    made = kind.__new__(kind)
    object.__setattr__(made, "__dict__", _defaults(kind) | fields)
    object.__setattr__(made, "__pydantic_fields_set__", set(fields))
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


@cache
def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_construct().__dict__
