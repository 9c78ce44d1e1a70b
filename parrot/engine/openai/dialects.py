"""Fields that servers of other makers understand beyond OpenAI's own, and what they can do.

A server says who it is in the `owned_by` of its model list. An unknown one gets OpenAI's fields
only; a sampling field that it cannot carry out is refused by name, never dropped."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parrot.protocol.sampling import OPENAI_NAMES, VLLM_NAMES

_STANDARD = frozenset(
    {
        *OPENAI_NAMES,
        "max_gen_length",
        "seed",
        "logprobs",
    }
)


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Names of a server's metrics, the usual one first. `replica`: the label that tells apart
    copies of the model behind one address."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    usage: tuple[str, ...]
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """`extras`: our sampling field -> the server's name of it. `off`: the server's name of a
    field -> the value that turns it off, sent if a request does so against a server's default.
    `is_serial`: the server has one request at a time; a second one cuts the first short, and who
    leaves before an answer that is not streamed stops nothing. `schema_in_object`: how it wants the
    schema of `response_format`. `takes_options`: of the model's template, and earlier reasoning.
    `can`: of `FEATURES`, unless it tells otherwise; `kept_prompts`: see `Capabilities`; `load`:
    None if its metrics do not tell it."""

    name: str
    extras: Mapping[str, str] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)
    schema_on_completions: bool = False
    schema_in_object: bool = False
    is_serial: bool = False
    takes_options: bool = False
    can: frozenset[str] = frozenset()
    kept_prompts: int | None = None
    load: LoadMetrics | None = None

    def features(self, is_chat: bool) -> frozenset[str]:
        schema = {"json_schema"} if is_chat or self.schema_on_completions else set()
        return _STANDARD | self.extras.keys() | schema | self.can


OPENAI = Dialect("openai", can=frozenset({"messages", "tools", "cached_tokens"}))

_GUIDED = dict.fromkeys(("regex", "grammar", "choices"), "structured_outputs")
_OFF = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_LLAMA_EXTRAS = {"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"}
_LLAMA_OFF = {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}

VLLM = Dialect(
    "vllm",
    {**VLLM_NAMES, **_GUIDED},
    _OFF,
    schema_on_completions=True,
    takes_options=True,
    can=frozenset({"messages", "tools", "cache_salt", "cached_tokens", "cancellation"}),
    load=LoadMetrics(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        replica="engine",
    ),
)
SGLANG = Dialect(
    "sglang",
    {**VLLM_NAMES, "regex": "regex", "choices": "regex"},
    _OFF,
    schema_on_completions=True,
    takes_options=True,
    can=frozenset({"messages", "tools", "cache_salt", "cached_tokens", "cancellation"}),
    load=LoadMetrics(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        usage=("sglang:token_usage",),
        replica="dp_rank",
    ),
)
LLAMA_CPP = Dialect(
    "llama.cpp",
    {**_LLAMA_EXTRAS, "ignore_tokenizer_eos": "ignore_eos"},
    _LLAMA_OFF,
    takes_options=True,
    can=frozenset({"messages", "tools", "cached_tokens", "cancellation"}),
    load=LoadMetrics(
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        usage=("llamacpp:kv_cache_usage_ratio",),
    ),
)
LLAMA_CPP_PYTHON = Dialect(
    "llama-cpp-python",
    _LLAMA_EXTRAS,
    _LLAMA_OFF,
    schema_in_object=True,
    is_serial=True,
    can=frozenset({"messages", "cancellation"}),
    kept_prompts=1,
)
OLLAMA = Dialect("ollama", can=frozenset({"messages", "tools", "cancellation"}))
LM_STUDIO = Dialect(
    "lm-studio", {"top_k": "top_k"}, {"top_k": 0}, can=frozenset({"messages", "tools"})
)
PARROT = Dialect(
    "parrot",
    {**VLLM_NAMES, **_GUIDED},
    {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    schema_on_completions=True,
    takes_options=True,
    can=frozenset({"messages", "tools", "cached_tokens", "cancellation"}),
)

DIALECTS = {
    dialect.name: dialect
    for dialect in (OPENAI, VLLM, SGLANG, LLAMA_CPP, LLAMA_CPP_PYTHON, OLLAMA, LM_STUDIO, PARROT)
}
BY_OWNER: Mapping[str, Dialect] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMA_CPP,
    "me": LLAMA_CPP_PYTHON,
    "library": OLLAMA,
    "organization_owner": LM_STUDIO,
    "parrot": PARROT,
}
