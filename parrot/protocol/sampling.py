"""Sampling settings of an output: one class for the front end, REST, and the engines."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from parrot.protocol.errors import UnsupportedField

MAX_STOP_STRINGS = 16
MAX_GEN_LENGTH = 1_000_000
MAX_GRAMMAR = 65536
MAX_CHOICES = 1024

CONSTRAINTS = ("json_schema", "regex", "grammar", "choices")
"""The fields that say which texts an output may be; at most one is set."""

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_StopString = Annotated[str, Field(min_length=1, max_length=256)]
_Choice = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
_StopStrings = Annotated[tuple[_StopString, ...], Field(max_length=MAX_STOP_STRINGS)]


class SamplingConfig(BaseModel):
    """All fields are optional. `temperature=0` is greedy; penalties of 0 (and a repetition penalty
    of 0 or 1) are off; `max_gen_length` is in tokens. `grammar` is Lark text; an output with
    `choices` is one of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    max_gen_length: int = Field(512, ge=1, le=MAX_GEN_LENGTH)
    ignore_tokenizer_eos: bool = False
    stop_token_ids: tuple[_TokenId, ...] = Field((), max_length=1024)
    stop_str: _StopString | _StopStrings | None = Field(None)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(0.0, ge=0.0, le=10.0)
    length_penalty: float = Field(0.0, ge=-10.0, le=10.0)
    n: int = Field(1, ge=1, le=16)
    best_of: int = Field(1, ge=1, le=16)
    logit_bias: dict[_TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        None, max_length=1024
    )
    seed: int | None = Field(None, ge=0, lt=2**63)
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = Field(None, max_length=MAX_GRAMMAR)
    grammar: str | None = Field(None, max_length=MAX_GRAMMAR)
    choices: tuple[_Choice, ...] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Self:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` exclude each other")
        return self

    @property
    def constraint(self) -> str | None:
        """The name of the field that constrains the output, if one does."""
        return next((name for name in CONSTRAINTS if getattr(self, name) is not None), None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop_str is None:
            return ()
        return (self.stop_str,) if isinstance(self.stop_str, str) else self.stop_str

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def takes_the_largest(self) -> bool:
        """Only the largest logit may be sampled."""
        return self.is_greedy or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Logits are changed before a token is chosen, mostly by what was generated so far."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.repetition_penalty not in (0.0, 1.0)
        )

    @property
    def is_deterministic(self) -> bool:
        """The same prompt gives the same tokens: greedy, or seeded."""
        return self.is_greedy or self.seed is not None

    def require_support(self, supported: frozenset[str], server: str) -> None:
        """Raise `UnsupportedField` naming the first field that is set and not in `supported`.

        `server` says in the message who refuses, for example "the builtin engine"."""
        for name in type(self).model_fields:
            if name not in supported and getattr(self, name) != _DEFAULTS[name]:
                raise UnsupportedField(f"{server} does not support `{name}` yet", param=name)


_DEFAULTS: dict[str, Any] = SamplingConfig().model_dump()
