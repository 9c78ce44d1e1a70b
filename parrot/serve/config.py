"""ServeCore's configuration: the keys of its file, their defaults and bounds."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from parrot.protocol.server_config import ConnectionLimits, HostNames, Secret
from parrot.utils.config import ConfigModel
from parrot.utils.settings import ConfigFile, Settings, read_settings
from parrot.utils.shard import ALONE, Shard

Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]

KvEviction = Literal["next_use", "lru"]
PlacementName = Literal["predicted"]
PrefixDiagnosis = Literal["off", "report"]
OrderName = Literal["critical_path", "fcfs"]


class ShardsConfig(ConfigModel):
    """Several ServeCores that share sessions out among them, by their ids. Each has engines and a
    journal of its own, and hands on requests for what another has (docs/reliability.md)."""

    index: int = Field(ge=0, lt=64, description="Which of `cores` this one is.")
    cores: tuple[str, ...] = Field(
        min_length=2,
        max_length=64,
        strict=False,
        description="The addresses of all, as `http://HOST:PORT`, in the same order everywhere.",
    )

    @field_validator("cores")
    @classmethod
    def _are_addresses(cls, cores: tuple[str, ...]) -> tuple[str, ...]:
        for core in cores:
            parts = urlsplit(core)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path:
                raise ValueError(f"{core!r} is no address like http://HOST:PORT")
        if len(set(cores)) < len(cores):
            raise ValueError("two have the same address")
        return cores

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.index >= len(self.cores):
            raise ValueError(f"`index` {self.index} is none of {len(self.cores)} `cores`")
        return self

    @property
    def own_name(self) -> str:
        """The host by which the others reach this one."""
        return urlsplit(self.cores[self.index]).hostname or ""


class GlobalSchedulerConfig(ConfigModel):
    """Which application-level features the global scheduler uses."""

    app_fifo: bool = Field(
        True, description="Order applications. Else calls are ordered singly, whatever the policy."
    )
    graph_group: bool = Field(
        True, description="Deal out together the queued calls that feed the same consumer."
    )
    ctx_group: bool = Field(True, description="Place calls that share a prefix together.")
    ctx_aware: bool = Field(True, description="Weigh cached prefixes when choosing an engine.")
    kv_eviction: KvEviction = Field(
        "next_use",
        description="Which context goes when an engine is full: the one whose predicted next use "
        "is farthest, or the least recently used.",
    )
    eager_fill: bool = Field(
        True,
        description="Compute the known beginning of a prompt while the call waits for its other "
        "inputs, with what ready work leaves over.",
    )
    policy: OrderName = Field(
        "critical_path",
        description="Which application goes first: the one with the least predicted work left "
        "(aged, with deadlines, the longest path first in it, and no more at once than pays), or "
        "none (by the calls' arrival).",
    )
    placement: PlacementName = Field(
        "predicted",
        description="Which engine runs a call: the one with the least predicted seconds to it and "
        "to the calls there.",
    )
    reuse_results: bool = Field(
        True,
        description="Run identical deterministic calls once: greedy or seeded, inside a tenant.",
    )
    reuse_cache_size: int = Field(
        64 * 2**20, ge=0, le=2**40, description="Bytes of results kept; 0: only calls in flight."
    )
    reuse_timeout: Seconds = Field(3600.0, description="A result is kept for so long at most.")
    tenant_step_growth: float | None = Field(
        0.25,
        ge=0.0,
        le=1000.0,
        description="By what part another tenant of the same weight that crowds an engine may "
        "lengthen the steps of a call that somebody waits for. null: by any.",
    )
    max_queue_size: Count = Field(
        1024,
        description="With so many tasks queued, new calls and reads that need work get 503, if "
        "their tenant has its share: a part of this, by the weights of those with queued tasks.",
    )

    @field_validator("policy", "placement", mode="before")
    @classmethod
    def _is_no_baseline(cls, value: object) -> object:
        if value in ("las", "app_fifo", "round_robin", "prefix_aware"):
            raise ValueError(
                f"{value} is there for comparisons alone: `benchmark.serve.baselines` of Parrot's "
                "repository runs it over simulated engines"
            )
        return value


class SessionQuota(ConfigModel):
    """Limits of what one session may keep. The request that would exceed one gets 429, and nothing
    is lost."""

    holder: ClassVar[str] = "the session"
    key: ClassVar[str] = "session_quota"

    calls: Count = Field(
        65_536, description="Calls, which are kept until the session ends, with idempotency keys."
    )
    variables: Count = Field(262_144, description="Variables.")
    text_bytes: Count = Field(
        2**28, description="Bytes of its templates, native functions, output grammars and values."
    )
    native_ms: Count = Field(
        3_600_000, description="Milliseconds that its native functions run, all together."
    )


class TenantQuota(ConfigModel):
    """Limits of what all sessions of a tenant (one of `api_keys`, or all without) keep together.
    Where `api_keys` is empty, whoever makes up a key is a tenant."""

    holder: ClassVar[str] = "the tenant"
    key: ClassVar[str] = "tenant_quota"

    calls: int = Field(2**20, ge=1, le=2**40, description="Calls.")
    variables: int = Field(2**22, ge=1, le=2**40, description="Variables.")
    text_bytes: int = Field(2**32, ge=1, le=2**40, description="Bytes of text.")
    native_ms: int = Field(
        2**40, ge=1, le=2**40, description="Milliseconds of native functions of live sessions."
    )


class TokenPrices(ConfigModel):
    """The prices of a million tokens of a model, in whatever currency."""

    input: Price = Field(0.0, description="Prompt tokens that are computed.")
    cached: Price = Field(0.0, description="Prompt tokens whose KV is there already.")
    output: Price = Field(0.0, description="Output tokens.")


class CoreConfig(ConfigModel):
    """Everything that can be set of a ServeCore process. Durations are in seconds."""

    host: str = Field("localhost", min_length=1, description="Address to bind.")
    port: int = Field(9000, ge=0, le=65535, description="0: any free port.")
    max_sessions_num: Count = Field(2048, description="Live sessions; beyond it 429.")
    max_engines_num: Count = Field(2048, description="Registered engines; beyond it 429.")
    session_life_span: Seconds = Field(
        600.0, description="A session ends after this long without activity or an open read."
    )
    engine_heartbeat_timeout: Seconds = Field(
        30.0, description="An engine that is silent for this long is lost: its calls run elsewhere."
    )
    no_engine_timeout: Seconds | None = Field(
        None,
        description="A call fails when no engine has served its models for this long, since it "
        "came and since the last such engine was lost; null: `engine_heartbeat_timeout`.",
    )
    constant_prefix_var_timeout: Seconds = Field(
        600.0, description="An unused constant-prefix context is freed after this long."
    )
    api_keys: tuple[Secret, ...] = Field(
        (),
        repr=False,
        description="If any, sessions, the endpoints of OpenAI and Anthropic, and the lists of "
        "models and routes need one of them (docs/security.md). Needed beyond loopback, if "
        "there is no `keys_file`.",
    )
    keys_file: str | None = Field(
        None,
        min_length=1,
        description="File of more keys, JSON or YAML: their digests, scopes and limits "
        "(docs/security.md). It is read again when it has changed.",
    )
    public_prefixes: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        max_length=16,
        description="Files of texts with which prompts or system messages of many tenants begin, "
        "UTF-8, 1 MiB each at most. KV of them is shared by all (docs/security.md).",
    )
    cluster_token: Secret | None = Field(
        None,
        repr=False,
        description="Engines must present it, and are sent it. Needed with `api_keys`, and beyond "
        "loopback; null on loopback: that of a file in `state_dir`.",
    )
    insecure: bool = Field(
        False,
        description="Start without `cluster_token` or `api_keys` also where others can connect, "
        "and ask nobody for what is not set: whoever connects may use the service and, as an "
        "engine, read its prompts.",
    )
    allowed_hosts: HostNames = Field(
        (),
        description="Names under which proxies and other machines reach this server, besides `host`"
        " and this machine's name; addresses always do. `*`: any, also those of web pages.",
    )
    state_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder of the file `cluster_token`, which is made at the first start, for "
        "this user's eyes only; null: `$XDG_STATE_HOME/parrot` or `~/.local/state/parrot`.",
    )
    model_aliases: dict[str, str] = Field(
        {},
        max_length=1024,
        description="Other names of models in the APIs of OpenAI and Anthropic, for clients that "
        "have the names built in: from such a name to that of a model that engines serve.",
    )
    cors_origins: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(
        (),
        description="Origins (`https://app.example`) whose pages in a browser may call this API; "
        "`*` is every page.",
    )
    page: bool = Field(
        True,
        description="Show sessions, engines and values under `/ui/` to whoever has the page's key "
        "or, of their own sessions, an API key.",
    )
    global_scheduler: GlobalSchedulerConfig = GlobalSchedulerConfig()
    connections: ConnectionLimits = ConnectionLimits()
    session_quota: SessionQuota = SessionQuota()
    tenant_quota: TenantQuota = TenantQuota()
    max_body_size: Count = Field(
        32 * 2**20, description="Bytes of one request's body; beyond it 413."
    )
    responses_size: int = Field(
        2**28,
        ge=0,
        le=2**40,
        description="Bytes of `/v1/responses` that are kept, to be asked for and continued.",
    )
    prefix_repair: PrefixDiagnosis = Field(
        "report",
        description="Of programs that resend their history: say where a prompt left the one before "
        "it (`report`), or compare nothing (`off`).",
    )
    prices: dict[str, TokenPrices] = Field(
        {},
        max_length=1024,
        description="Prices by model, for the costs in metrics and sessions (docs/monitoring.md). "
        "`*` names the price of every other model.",
    )
    max_metric_names: int = Field(
        20,
        ge=1,
        le=1000,
        description="Functions, and applications, that have series of their own in metrics: those "
        "that are used most. The others are `other`.",
    )
    native_workers: int = Field(
        3,
        ge=1,
        le=64,
        description="Native functions that may run at once, a process each; one session's all but "
        "one of these.",
    )
    native_timeout: float = Field(
        60.0, gt=0, le=60, description="Seconds that a native function may ask for, at most."
    )
    native_memory_mb: int = Field(
        64, ge=1, le=65536, description="Memory one native function may use, in MiB."
    )
    journal: str | None = Field(
        None,
        min_length=1,
        description="Where sessions are stored, so that they survive a restart "
        "(docs/reliability.md): a file (SQLite), or a database that standbys share "
        "(`postgresql://USER:PASSWORD@HOST/DATABASE`, needs the extra `postgres`). null: sessions "
        "end with this process.",
    )
    journal_size: int = Field(
        2**32,
        ge=2**20,
        le=2**46,
        description="Bytes of the journal; when it is full, what would be written gets 507.",
    )
    journal_timeout: Seconds = Field(
        10.0,
        description="What waits for the journal's disk for longer gets 507, until the disk has "
        "caught up.",
    )
    shards: ShardsConfig | None = Field(None, description="Null: this ServeCore is the only one.")
    trace_path: str | None = Field(
        None,
        min_length=1,
        description="If set, what programs ask is recorded in this file, for `parrot simulate`.",
    )
    audit_path: str | None = Field(
        None,
        min_length=1,
        description="If set, what operators do (drains, ended sessions, cancelled calls), who is "
        "let into the page, engines that join, changed keys and failed authentications are added "
        "to this file, a line of JSON each.",
    )
    otlp_endpoint: str | None = Field(
        None,
        min_length=1,
        description="If set, traces go to this address by OTLP over HTTP, for example "
        "`http://localhost:4318/v1/traces` (docs/monitoring.md). Needs the extra `otel`.",
    )
    otlp_sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="The share of traces that are sent, chosen by their ids; what has a caller's "
        "span above it is sent if that is. null: as `OTEL_TRACES_SAMPLER` says in the environment, "
        "else all.",
    )

    @field_validator("prefix_repair", mode="before")
    @classmethod
    def _edits_no_prompts(cls, value: object) -> object:
        if value == "on":
            raise ValueError(
                "prompts are not edited any more: with `report` the header `x-parrot-prefix` says "
                "what differs with each request, which its program has to leave out"
            )
        return value

    @property
    def shard(self) -> Shard:
        own = self.shards
        return ALONE if own is None else Shard(own.index, len(own.cores))

    @property
    def needs_keys(self) -> bool:
        """Whether programs must have a key."""
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def unserved_timeout_s(self) -> float:
        if self.no_engine_timeout is None:
            return self.engine_heartbeat_timeout
        return self.no_engine_timeout


def core_settings(
    file: ConfigFile, options: Mapping[str, Any], environ: Mapping[str, str]
) -> Settings:
    """ServeCore's settings from its file, its environment and its command line; raises
    `ConfigError`."""
    return read_settings("core", file, options, environ, lambda known: CoreConfig)
