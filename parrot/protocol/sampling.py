"""Sampling settings of an output, for the front end, REST and the engines, and the log
probabilities of its tokens."""

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Annotated, Any, Protocol, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from parrot.protocol.errors import UnsupportedField
from parrot.protocol.fields import JsonObject, Text, TokenId

MAX_STOP_STRINGS = 16
MAX_GEN_LENGTH = 1_000_000
MAX_GRAMMAR = 65536
MAX_CHOICES = 1024
MAX_LOGPROBS = 20

CONSTRAINTS = ("json_schema", "regex", "grammar", "choices")
"""The fields that restrict the text of an output. At most one is set."""

_StopString = Annotated[str, Field(min_length=1, max_length=256)]
_Choice = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
GenLength = Annotated[int, Field(ge=1, le=MAX_GEN_LENGTH)]
Grammar = Annotated[str, Field(max_length=MAX_GRAMMAR)]
StopIds = Annotated[tuple[TokenId, ...], Field(max_length=1024)]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Choices = Annotated[tuple[_Choice, ...], Field(min_length=1, max_length=MAX_CHOICES)]
LogitBias = Annotated[dict[TokenId, _Bias], Field(max_length=1024)]
StopStrings = Annotated[tuple[_StopString, ...], Field(max_length=MAX_STOP_STRINGS)]
_Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
_TopP = Annotated[float, Field(gt=0.0, le=1.0)]
_TopK = Annotated[int, Field(ge=0, le=2**31 - 1)]
_MinP = Annotated[float, Field(ge=0.0, le=1.0)]
_RepetitionPenalty = Annotated[float, Field(ge=0.0, le=10.0)]

_TEMPERATURE = "Randomness. 0 is greedy."
_TOP_P = "Sample from the most likely tokens with this total probability. 1 is off."
_TOP_K = "Sample from this number of most likely tokens. 0 is off."
_MIN_P = "Minimum probability, relative to the most likely token. 0 is off."

_SAME = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
OPENAI_NAMES = {name: name for name in _SAME} | {"stop_str": "stop"}
"""OpenAI's field names by our names."""
_FURTHER = ("top_k", "min_p", "repetition_penalty", "stop_token_ids")
VLLM_NAMES = {name: name for name in _FURTHER} | {"ignore_tokenizer_eos": "ignore_eos"}
"""The names of further fields in vLLM and similar servers, by our names."""


OPEN_LENGTH = 16_384
"""Output tokens of API requests that set no limit. A foreign server sets its own limit instead."""


class SamplingConfig(BaseModel):
    """How an output is generated. All fields are optional. The engine fills in `temperature`,
    `top_p`, `top_k`, `min_p` and `repetition_penalty` if they are null. At most one of
    `json_schema`, `regex`, `grammar` and `choices` is set."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: _Temperature | None = Field(default=None, description=_TEMPERATURE)
    top_p: _TopP | None = Field(default=None, description=_TOP_P)
    top_k: _TopK | None = Field(default=None, description=_TOP_K)
    min_p: _MinP | None = Field(default=None, description=_MIN_P)
    max_gen_length: GenLength = Field(
        default=512, description="Maximum length of the output, in tokens."
    )
    ignore_tokenizer_eos: bool = Field(
        default=False, description="Continue after the model's end token."
    )
    stop_token_ids: StopIds = Field(default=(), description="Tokens that end the output.")
    stop_str: _StopString | StopStrings | None = Field(
        default=None, description="Up to 16 strings that end the output."
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2.0, le=2.0, description="Penalty for tokens that the output contains."
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2.0, le=2.0, description="The same, for each occurrence."
    )
    repetition_penalty: _RepetitionPenalty | None = Field(
        default=None, description="Factor against tokens of prompt and output. 0 or 1 is off."
    )
    length_penalty: float = Field(
        default=0.0, ge=-10.0, le=10.0, description="Only the default is supported."
    )
    n: int = Field(default=1, ge=1, le=16, description="Only the default is supported.")
    best_of: int = Field(default=1, ge=1, le=16, description="Only the default is supported.")
    logit_bias: LogitBias | None = Field(
        default=None, description="Values from -100 to 100 to add to logits, by token id."
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Fixes the random numbers. In bfloat16 and float16 the text may still differ.",
    )
    json_schema: JsonObject | Text | None = Field(
        default=None, description="The output is JSON of this schema."
    )
    regex: Grammar | None = Field(
        default=None, description="The output matches this regular expression."
    )
    grammar: Grammar | None = Field(
        default=None, description="The output follows this Lark grammar."
    )
    choices: Choices | None = Field(default=None, description="The output is one of these texts.")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return log probabilities of each token and of this number of most likely "
        "tokens.",
    )
    extra: JsonObject | None = Field(
        default=None,
        description="Further fields for the server behind an engine; Parrot's own take precedence.",
    )

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Self:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` exclude each other")
        return self

    @property
    def constraint(self) -> str | None:
        """The name of the field that constrains the output, if one does."""
        for name in CONSTRAINTS:
            if getattr(self, name) is not None:
                return name
        return None

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
        """Whether the token with the largest logit is always chosen."""
        return self.is_greedy or self.top_k == 1

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties or biases change the logits before a token is sampled."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.repetition_penalty not in (None, 0.0, 1.0)
        )

    @property
    def is_deterministic(self) -> bool:
        """Whether the same prompt gives the same tokens: greedy or seeded sampling."""
        return self.is_greedy or self.seed is not None

    def needs(self) -> frozenset[str]:
        """The names of set fields whose values have an effect."""
        fields = self.__dict__
        given = self.model_fields_set
        return frozenset([name for name in given if fields[name] not in _NEEDS_NOTHING[name]])

    def require_support(self, supported: frozenset[str], server: str) -> None:
        """Raises `UnsupportedField` with the first needed field that is not in `supported`.
        `server` names the server in the message, for example "the builtin engine"."""
        lacking = self.needs() - supported
        for name in type(self).model_fields:
            if name in lacking:
                raise UnsupportedField(f"{server} does not support `{name}` yet", param=name)


class ResolvedSampling(SamplingConfig):
    """A sampling config in which the engine has replaced all None values."""

    temperature: _Temperature = 1.0
    top_p: _TopP = 1.0
    repetition_penalty: _RepetitionPenalty = 1.0


class DefaultSampling(BaseModel):
    """Values for the sampling fields that a request does not set."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: _Temperature | None = Field(default=None, description=_TEMPERATURE)
    top_p: _TopP | None = Field(default=None, description=_TOP_P)
    top_k: _TopK | None = Field(default=None, description=_TOP_K)
    min_p: _MinP | None = Field(default=None, description=_MIN_P)
    repetition_penalty: _RepetitionPenalty | None = Field(
        default=None,
        description="Factor against tokens of prompt and output. 1 is off. Not for outputs with a "
        "grammar.",
    )

    def over(self, other: "DefaultSampling") -> "DefaultSampling":
        """These values, and those of `other` for the fields that are None here."""
        return DefaultSampling.model_validate(dict(other) | self.model_dump(exclude_none=True))

    def shown(self) -> str:
        """The values that have an effect, as text for users."""
        named = [
            f"{name} {value:g}"
            for name, value in self.__dict__.items()
            if value is not None and (name == "temperature" or value != _NEUTRAL[name])
        ]
        return ", ".join(named)

    def resolve(self, config: SamplingConfig) -> ResolvedSampling:
        """Fill in the fields that are None in `config`. The default `repetition_penalty` does not
        apply to an output with a constraint, because it would distort the required syntax."""
        fields = config.__dict__.copy()
        penalizes = self.repetition_penalty not in (None, 1.0)
        if penalizes and fields["repetition_penalty"] is None and config.constraint is not None:
            fields["repetition_penalty"] = 1.0
        for name, value in self.__dict__.items():
            if fields[name] is None:
                fields[name] = _NEUTRAL[name] if value is None else value
        fields["top_k"] = fields["top_k"] or None
        return ResolvedSampling.model_construct(**fields)


_NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
NEUTRAL_SAMPLING = DefaultSampling(**_NEUTRAL)
"""The defaults if neither the engine's config nor the model has any: no change of the logits."""
_NEEDS_NOTHING: dict[str, tuple[Any, ...]] = {
    name: (value, _NEUTRAL[name]) if name in _NEUTRAL else (value,)
    for name, value in SamplingConfig().model_dump().items()
}


class TokenTable(Protocol):
    """The bytes of each token, by its id."""

    def __getitem__(self, number: int, /) -> bytes: ...


class Logprobs:
    """Log probabilities of an output's tokens: the log-softmax of the model's raw logits, before
    temperature, penalties, biases and masks.

    Each token has a row of `width` entries: the token itself, then the most likely tokens at its
    position in descending order. `ids` and `values` are flat, of shape [rows * width]. An id is -1
    if a server returned fewer tokens. `tokens` is the table for the ids (None: the engine's
    tokenizer). `ending`: the rows of the stop string or stop token, if known."""

    __slots__ = ("ending", "ids", "tokens", "values", "width")

    def __init__(
        self,
        width: int,
        ids: Iterable[int] = (),
        values: Iterable[float] = (),
        tokens: TokenTable | None = None,
    ) -> None:
        self.width = width
        self.ids = array("i", ids)
        self.values = array("f", values)
        self.tokens = tokens
        self.ending: Logprobs | None = None

    def __len__(self) -> int:
        return len(self.ids) // self.width

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Logprobs) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]  # Instances are mutable.

    def __repr__(self) -> str:
        return f"<Logprobs of {len(self)} tokens, {self.width - 1} others each>"

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes, without a tokenizer's table."""
        table = self.tokens
        texts = sum(map(len, table)) + 40 * len(table) if isinstance(table, list) else 0
        return 2 * self.ids.itemsize * len(self.ids) + texts

    def add(self, ids: Iterable[int], values: Iterable[float]) -> None:
        """Append a row."""
        self.ids.extend(ids)
        self.values.extend(values)

    def part(self, start: int, stop: int | None = None) -> "Logprobs":
        """The rows [start, stop)."""
        width = self.width
        cut = slice(start * width, None if stop is None else stop * width)
        return Logprobs(width, self.ids[cut], self.values[cut], self.tokens)

    def extend(self, more: "Logprobs") -> None:
        """Append the rows of `more`, which must have the same width. Its table may differ."""
        assert self.width == more.width, (self, more)
        ids = more.ids
        if self.tokens is not more.tokens:
            table = self._own_table()
            theirs = more.tokens
            assert theirs is not None, "the bytes of the tokens are unknown"
            ids = array("i", [i if i < 0 else _place(table, theirs[i]) for i in ids])
        self.ids.extend(ids)
        self.values.extend(more.values)

    @classmethod
    def joined(
        cls,
        before: "Logprobs | None",
        more: "Logprobs | None",
        tokens: TokenTable | None = None,
        num_shown: int | None = None,
    ) -> "Logprobs | None":
        """Append the rows of `more` to `before` and return the result. Both may be modified.
        `tokens`: the table of `more`, unless it has its own. Rows after the first `num_shown`
        become the `ending`."""
        if more is None:
            return before
        if tokens is not None:
            more.tokens = tokens
        joined = shown = more if num_shown is None else more.part(0, num_shown)
        if before is not None:
            joined = before
            joined.extend(shown)
        if num_shown is not None:
            joined.ending = more.part(num_shown)
        return joined

    def _own_table(self) -> list[bytes]:
        """A table of the used tokens that can grow. Renumbers the ids."""
        if not isinstance(self.tokens, list):
            tokens, table = self.tokens, list[bytes]()
            assert tokens is not None, "the bytes of the tokens are unknown"
            self.ids = array("i", [i if i < 0 else _place(table, tokens[i]) for i in self.ids])
            self.tokens = table
        else:
            self.tokens = table = list(self.tokens)
        return table

    def _fields(self) -> tuple[Any, ...]:
        return self.width, self.ids, self.values, self.tokens

    def _dump(self) -> dict[str, Any]:
        return {
            "width": self.width,
            "ids": b64encode(self.ids.tobytes()).decode(),
            "values": b64encode(self.values.tobytes()).decode(),
            "tokens": [token.decode("latin-1") for token in self.tokens]
            if isinstance(self.tokens, list)
            else None,
        }


def _place(table: list[bytes], token: bytes) -> int:
    """Append a token to the table and return its index."""
    table.append(token)
    return len(table) - 1


def _load_logprobs(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    texts = value.get("tokens")
    try:
        loaded = Logprobs(value["width"])
        loaded.ids.frombytes(b64decode(value["ids"], validate=True))
        loaded.values.frombytes(b64decode(value["values"], validate=True))
        if texts is not None:
            loaded.tokens = [text.encode("latin-1") for text in texts]
        num, num_known = len(loaded.ids), 2**31 if texts is None else len(texts)
        if loaded.width < 1 or num % loaded.width or num != len(loaded.values):
            raise ValueError("rows of different lengths")
        chosen = loaded.ids[:: loaded.width]
        if num and not (min(chosen) >= 0 and -1 <= min(loaded.ids) <= max(loaded.ids) < num_known):
            raise ValueError("ids outside of the vocabulary")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"invalid log probabilities: {error}") from None
    return loaded


WireLogprobs = Annotated[
    InstanceOf[Logprobs],
    BeforeValidator(_load_logprobs),
    PlainSerializer(Logprobs._dump),
    WithJsonSchema(
        {
            "type": "object",
            "description": "a row of `width` entries for each token: the token, then the most "
            "likely ones. `ids` (int32) and `values` (float32) are little-endian and in base64; "
            "`tokens`: what `ids` are indices of, if not of the tokenizer, each byte a character",
        }
    ),
]
"""Log probabilities in the format that engines send."""


class LikelyToken(BaseModel):
    """A token and the natural logarithm of its probability."""

    token: str = Field(description="Its text. A part of a character is U+FFFD.")
    logprob: float
    bytes: list[int]


class TokenLogprob(LikelyToken):
    """A token of an output."""

    top_logprobs: list[LikelyToken] = Field(
        description="The most likely tokens at this position, the most likely first."
    )
