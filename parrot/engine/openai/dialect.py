"""What OpenAI-compatible servers understand beyond OpenAI's own fields.

A server says who it is in the `owned_by` of its model list. An unknown one gets OpenAI's fields
only; a sampling field that it cannot carry out is refused by name, never dropped."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_STANDARD = frozenset(
    {
        "temperature",
        "top_p",
        "max_gen_length",
        "stop_str",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
    }
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """`extras`: our sampling field -> the server's name of it. `neutral`: sent with each request,
    since the server would otherwise put its own or the model's defaults in place of ours."""

    name: str
    extras: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, Any] = field(default_factory=dict)
    schema_on_completions: bool = False

    def supported(self, is_chat: bool) -> frozenset[str]:
        schema = {"json_schema"} if is_chat or self.schema_on_completions else set()
        return _STANDARD | self.extras.keys() | schema


OPENAI = Dialect("openai")

_EXTRAS = {
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "ignore_tokenizer_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
}
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_LLAMA_EXTRAS = {"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"}
_LLAMA_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}

BY_OWNER: Mapping[str, Dialect] = {
    "vllm": Dialect(
        "vllm", {**_EXTRAS, "regex": "structured_outputs"}, _NEUTRAL, schema_on_completions=True
    ),
    "sglang": Dialect(
        "sglang", {**_EXTRAS, "regex": "regex"}, _NEUTRAL, schema_on_completions=True
    ),
    "llamacpp": Dialect(
        "llama.cpp", {**_LLAMA_EXTRAS, "ignore_tokenizer_eos": "ignore_eos"}, _LLAMA_NEUTRAL
    ),
    "me": Dialect("llama-cpp-python", _LLAMA_EXTRAS, _LLAMA_NEUTRAL),
}
