"""Kinds of foreign servers: their features, and their request fields besides OpenAI's.

The field `owned_by` of a server's model list identifies its kind. An unknown server gets only
OpenAI's fields. Parrot rejects unsupported sampling fields and never drops them."""

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
        "extra",
    }
)


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """The names of a server's metrics. The first name that the server has is used."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    usage: tuple[str, ...]
    replica: str = ""  # The label that distinguishes replicas of the model at one address.


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of server: its request fields and its features."""

    name: str
    extras: Mapping[str, str] = field(default_factory=dict)  # Our sampling field -> its name.
    # Its field -> the value that turns the field off. It is sent if a request turns the field off,
    # because the server may have another default.
    off: Mapping[str, Any] = field(default_factory=dict)
    schema_on_completions: bool = False  # /completions accepts `response_format`.
    schema_in_object: bool = False  # The schema is a key of `{"type": "json_object"}`.
    # The server runs one request at a time. A second request cuts off the first one, and only the
    # disconnect of a stream stops a request.
    is_serial: bool = False
    answers_while_busy: bool = True  # It answers other requests during long computations.
    takes_request_id: bool = True  # It accepts any id in `X-Request-Id`.
    takes_options: bool = False  # It accepts template options and earlier reasoning.
    can: frozenset[str] = frozenset()  # Features out of `FEATURES`, unless it reports others.
    kept_prompts: int | None = None  # See `Capabilities`.
    load: LoadMetrics | None = None  # None: its metrics do not contain the load.

    def features(self, is_chat: bool) -> frozenset[str]:
        schema = {"json_schema"} if is_chat or self.schema_on_completions else set()
        return _STANDARD | self.extras.keys() | schema | self.can


OPENAI = Dialect(
    "openai", answers_while_busy=False, can=frozenset({"messages", "tools", "cached_tokens"})
)

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
    answers_while_busy=False,
    takes_request_id=False,  # It answers 400 unless the id is a UUID.
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
