"""Outputs that nobody gets as they come, as heartbeats tell of them."""

from array import array
from collections.abc import Iterable

from pydantic import Base64UrlBytes, BaseModel, ConfigDict, Field, field_validator

from parrot.protocol.gate.fields import Amount

MOST_IDS = 12_288
"""Ids that a part may have."""

_ID_BYTES = array("I").itemsize


class OutputPart(BaseModel):
    """Tokens of the output on this context, from number `start` on: their ids as 32-bit numbers,
    little-endian, in base64."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    context_id: Amount
    start: Amount
    ids: Base64UrlBytes = Field(max_length=2**16)  # characters: `MOST_IDS`

    @field_validator("ids")
    @classmethod
    def _is_whole(cls, ids: bytes) -> bytes:
        if len(ids) % _ID_BYTES:
            raise ValueError("`ids` must be 32-bit numbers")
        return ids

    @staticmethod
    def of(context_id: int, start: int, ids: Iterable[int]) -> "OutputPart":
        packed = array("I", ids).tobytes()
        return OutputPart.model_construct(context_id=context_id, start=start, ids=packed)

    @property
    def end(self) -> int:
        return self.start + len(self.ids) // _ID_BYTES

    def token_ids(self) -> "array[int]":
        return array("I", self.ids)
