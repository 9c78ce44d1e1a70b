"""ServeCore's configuration: the keys of its file, their defaults and bounds."""

from collections.abc import Mapping
from functools import cached_property
from ipaddress import ip_network
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from parrot.protocol.server_config import ConnectionLimits, HostNames, Secret
from parrot.utils.config import ConfigModel
from parrot.utils.settings import ConfigFile, Settings, read_settings
from parrot.utils.shard import ALONE, Shard


def _network(text: str) -> str:
    """An IP address or network. A host name could be resolved to another address later."""
    try:
        ip_network(text)
    except ValueError as error:
        raise ValueError(f"`{text:.80}` is not an address or a network: {error}") from None
    return text


Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Network = Annotated[str, AfterValidator(_network)]
Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]

KvEviction = Literal["next_use", "lru"]
PlacementName = Literal["predicted"]
PrefixDiagnosis = Literal["off", "report"]
OrderName = Literal["critical_path", "fcfs"]


class ShardsConfig(ConfigModel):
    """Several ServeCores that divide the sessions by id. Each has its own engines and journal, and
    forwards requests for other shards' sessions (docs/reliability.md)."""

    index: int = Field(ge=0, lt=64, description="Position of this ServeCore in `cores`.")
    cores: tuple[str, ...] = Field(
        min_length=2,
        max_length=64,
        strict=False,
        description="Addresses of all shards as `http://HOST:PORT`, in the same order on every "
        "shard.",
    )

    @field_validator("cores")
    @classmethod
    def _are_addresses(cls, cores: tuple[str, ...]) -> tuple[str, ...]:
        for core in cores:
            parts = urlsplit(core)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path:
                raise ValueError(f"{core!r} is not an address like http://HOST:PORT")
        if len(set(cores)) < len(cores):
            raise ValueError("two shards have the same address")
        return cores

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.index >= len(self.cores):
            raise ValueError(
                f"`index` {self.index} must be below {len(self.cores)}, the number of `cores`"
            )
        return self

    @property
    def own_name(self) -> str:
        """The host name under which the other shards reach this one."""
        return urlsplit(self.cores[self.index]).hostname or ""


class GlobalSchedulerConfig(ConfigModel):
    """The application-level features of the global scheduler."""

    app_fifo: bool = Field(
        True, description="Order whole applications. false: order single calls, for every policy."
    )
    graph_group: bool = Field(
        True, description="Place queued calls that feed the same call as a group."
    )
    ctx_group: bool = Field(True, description="Place calls that share a prefix together.")
    ctx_aware: bool = Field(True, description="Consider cached prefixes when choosing an engine.")
    kv_eviction: KvEviction = Field(
        "next_use",
        description="Which context a full engine evicts first: the one with the latest "
        "predicted next use (`next_use`), or the least recently used (`lru`).",
    )
    eager_fill: bool = Field(
        True,
        description="Compute the known prefix of a prompt while the call waits for its other "
        "inputs, with capacity that ready calls do not need.",
    )
    policy: OrderName = Field(
        "critical_path",
        description="Which application goes first. `critical_path`: the one with the least "
        "predicted work left; age and deadlines count. `fcfs`: calls by arrival.",
    )
    placement: PlacementName = Field(
        "predicted",
        description="Which engine runs a call. `predicted`: the engine where the call and its "
        "effect on other calls cost the fewest predicted seconds.",
    )
    reuse_results: bool = Field(
        True,
        description="Run identical deterministic calls of one tenant once. Deterministic means "
        "greedy or seeded.",
    )
    reuse_cache_size: int = Field(
        64 * 2**20,
        ge=0,
        le=2**40,
        description="Bytes of results that are kept for reuse. 0: only calls that run at the "
        "same time share a result.",
    )
    reuse_timeout: Seconds = Field(3600.0, description="Maximum age of a result for reuse.")
    tenant_step_growth: float | None = Field(
        0.25,
        ge=0.0,
        le=1000.0,
        description="By how much another tenant of equal weight may lengthen the steps of an "
        "interactive call; 0.25 means 25%. null: no limit.",
    )
    max_queue_size: Count = Field(
        1024,
        description="Number of queued tasks at which new calls get 503. A tenant below its "
        "weighted share of this number is still accepted.",
    )

    @field_validator("policy", "placement", mode="before")
    @classmethod
    def _is_no_baseline(cls, value: object) -> object:
        if value in ("las", "app_fifo", "round_robin", "prefix_aware"):
            raise ValueError(
                f"{value} is only for comparisons: `benchmark.serve.baselines` in Parrot's "
                "repository runs it on simulated engines"
            )
        return value


class SessionQuota(ConfigModel):
    """Limits of one session. A request beyond a limit gets 429 and changes nothing."""

    holder: ClassVar[str] = "the session"
    key: ClassVar[str] = "session_quota"

    calls: Count = Field(65_536, description="Calls. They count until the session ends.")
    variables: Count = Field(262_144, description="Variables.")
    text_bytes: Count = Field(
        2**28, description="Bytes of templates, native functions, output grammars and values."
    )
    native_ms: Count = Field(
        3_600_000, description="Total run time of native functions, in milliseconds."
    )

    @cached_property
    def limits(self) -> Mapping[str, int]:
        """The limits by name."""
        return dict(self)


class TenantQuota(ConfigModel):
    """Limits of all sessions of one tenant together. Without `api_keys`, each key that a client
    makes up is a tenant."""

    holder: ClassVar[str] = "the tenant"
    key: ClassVar[str] = "tenant_quota"

    calls: int = Field(2**20, ge=1, le=2**40, description="Calls.")
    variables: int = Field(2**22, ge=1, le=2**40, description="Variables.")
    text_bytes: int = Field(2**32, ge=1, le=2**40, description="Bytes of text.")
    native_ms: int = Field(
        2**40,
        ge=1,
        le=2**40,
        description="Run time of native functions in live sessions, in milliseconds.",
    )

    @cached_property
    def limits(self) -> Mapping[str, int]:
        """The limits by name."""
        return dict(self)


class TokenPrices(ConfigModel):
    """Prices of a million tokens of a model, in any currency."""

    input: Price = Field(0.0, description="Prompt tokens that are computed.")
    cached: Price = Field(0.0, description="Prompt tokens found in a KV cache.")
    output: Price = Field(0.0, description="Output tokens.")


class HistoryConfig(ConfigModel):
    """Finished runs (ended sessions) that the web page, `parrot trace` and `parrot top` still show.
    They contain prompts and values. They are stored in the journal, if there is one."""

    max_runs: int = Field(
        50,
        ge=0,
        le=100_000,
        description="Number of finished runs that are kept. Beyond it, the tenant with the most "
        "runs loses its oldest one. 0: no history.",
    )
    max_age: Seconds = Field(86_400.0, description="A run is deleted this long after its end.")
    size: int = Field(
        64 * 2**20,
        ge=2**16,
        le=2**40,
        description="Bytes of all kept runs together, and at most an eighth of `journal_size`. One "
        "tenant gets half of it. A run keeps the texts that fit in an eighth of it.",
    )


class UpstreamServer(ConfigModel):
    """A server with an OpenAI API that ServeCore calls itself, without an engine process."""

    url: str = Field(
        max_length=4096,
        description="Base URL of the server's API, such as `http://localhost:8000/v1`.",
    )
    models: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        (),
        strict=False,
        max_length=1024,
        description="Models to serve. Empty: every model that the server lists.",
    )
    forward_client_key: bool = Field(
        False,
        description="Send the API key of each client to the server, instead of the configured key. "
        "ServeCore must have no `api_keys` and no `keys_file`.",
    )
    engine: dict[str, Any] = Field(
        {},
        repr=False,
        description="Further keys of an `openai` engine's config, such as "
        '`{"instance": {"api_key_file": "/etc/vllm.key"}}`.',
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        at = urlsplit(url)
        if at.scheme not in ("http", "https") or not at.hostname or at.query or at.port == 0:
            raise ValueError("must be a URL like http://HOST:PORT/v1")
        return url.rstrip("/")

    @field_validator("engine")
    @classmethod
    def _has_no_identity(cls, engine: dict[str, Any]) -> dict[str, Any]:
        identity = ("engine_type", "engine_name", "model", "host", "port")
        if given := [key for key in identity if key in engine]:
            raise ValueError(f"`{given[0]}` is made from the URL and the server's model list")
        return engine


class CoreConfig(ConfigModel):
    """The configuration of a ServeCore process. Durations are in seconds."""

    host: str = Field("localhost", min_length=1, description="Address to bind.")
    port: int = Field(9000, ge=0, le=65535, description="0: any free port.")
    max_sessions_num: Count = Field(
        2048, description="Maximum number of live sessions. More get 429."
    )
    max_engines_num: Count = Field(
        2048, description="Maximum number of registered engines. More get 429."
    )
    session_life_span: Seconds = Field(
        600.0,
        description="A session ends this long after its last request. Running calls, and open "
        "reads with a timeout, keep it alive.",
    )
    engine_heartbeat_timeout: Seconds = Field(
        30.0,
        description="An engine without a heartbeat for this long is lost, and its calls move to "
        "other engines.",
    )
    no_engine_timeout: Seconds | None = Field(
        None,
        description="A read receives `no_engine` when no engine has served a needed model for this "
        "long. The call stays, and a later read waits again. null: `engine_heartbeat_timeout`.",
    )
    constant_prefix_var_timeout: Seconds = Field(
        600.0, description="An unused context of a constant prefix is freed after this long."
    )
    api_keys: tuple[Secret, ...] = Field(
        (),
        repr=False,
        description="API keys. With any, clients must send one (docs/security.md). A `host` "
        "beyond loopback needs `api_keys` or a `keys_file`.",
    )
    keys_file: str | None = Field(
        None,
        min_length=1,
        description="JSON or YAML file with digests, scopes and limits of API keys "
        "(docs/security.md). Changes are read while the server runs.",
    )
    public_prefixes: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        max_length=16,
        description="Text files with common prompt prefixes, UTF-8, at most 1 MiB each. All "
        "tenants share their KV cache (docs/security.md).",
    )
    cluster_token: Secret | None = Field(
        None,
        repr=False,
        description="Secret shared by ServeCore and engines. Required with `api_keys`, and "
        "beyond loopback. null on loopback: the token of the file in `state_dir`.",
    )
    insecure: bool = Field(
        False,
        description="Start without `cluster_token` or `api_keys` even if other machines can "
        "connect. Anyone who can connect can use the service, and can register an engine that "
        "reads prompts.",
    )
    allowed_hosts: HostNames = Field(
        (),
        description="Host names under which proxies and other machines reach this server, in "
        "addition to `host` and the name of this machine. IP addresses are always allowed. `*`: "
        "any name, also that of a web page.",
    )
    state_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder of the file `cluster_token`, which the first start creates with "
        "mode 600. null: `$XDG_STATE_HOME/parrot` or `~/.local/state/parrot`.",
    )
    model_aliases: dict[str, str] = Field(
        {},
        max_length=1024,
        description="Other names for served models in the OpenAI and Anthropic APIs, for "
        "clients with built-in model names.",
    )
    cors_origins: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(
        (),
        description="Origins (`https://app.example`) whose web pages may call this API. `*`: "
        "every page.",
    )
    page: bool = Field(
        True,
        description="Serve the web page under `/ui/`. Visitors need the key of the page, or an "
        "API key for their own sessions.",
    )
    history: HistoryConfig = Field(
        HistoryConfig(), description="Finished runs that the page still shows."
    )
    global_scheduler: GlobalSchedulerConfig = Field(
        GlobalSchedulerConfig(), description="Order and placement of calls."
    )
    connections: ConnectionLimits = Field(ConnectionLimits(), description="Limits of connections.")
    session_quota: SessionQuota = Field(SessionQuota(), description="Limits of one session.")
    tenant_quota: TenantQuota = Field(TenantQuota(), description="Limits of one tenant.")
    max_body_size: Count = Field(
        32 * 2**20, description="Maximum size of a request body in bytes. Larger ones get 413."
    )
    responses_size: int = Field(
        2**28,
        ge=0,
        le=2**40,
        description="Bytes of stored responses of `/v1/responses`. The oldest are deleted first.",
    )
    prefix_repair: PrefixDiagnosis = Field(
        "report",
        description="`report`: the header `x-parrot-prefix` tells clients that resend their "
        "history where a prompt left the previous one. `off`: no comparison.",
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
        description="Number of functions, and of applications, with metrics of their own. The "
        "most used ones are chosen; the others are counted as `other`.",
    )
    native_workers: int = Field(
        3,
        ge=1,
        le=64,
        description="Native functions that run at the same time, each in its own process. One "
        "session can use all except one.",
    )
    native_timeout: float = Field(
        60.0,
        gt=0,
        le=60,
        description="Longest run time that a native function may request, in seconds.",
    )
    native_memory_mb: int = Field(
        64, ge=1, le=65536, description="Memory limit of one native function, in MiB."
    )
    trusted_proxies: tuple[Network, ...] = Field(
        (),
        strict=False,
        max_length=64,
        description="Addresses and networks of proxies in front, such as `10.0.0.0/8`. Their "
        "headers `X-Forwarded-For` and `X-Forwarded-Proto` tell the client's address for the audit "
        "log, and whether the page's cookie is for TLS only.",
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
        description="Maximum size of the journal in bytes. When it is full, changes get 507. An "
        "eighth of it, at most 16 MiB, is a reserve for results of accepted calls.",
    )
    journal_timeout: Seconds = Field(
        10.0,
        description="Longest wait for the disk of the journal. After that, changes and reads of "
        "new values get 507 until the disk has caught up.",
    )
    servers: tuple[UpstreamServer, ...] = Field(
        (),
        strict=False,
        max_length=256,
        description="Servers with an OpenAI API (vLLM, SGLang, llama.cpp, Ollama and others) that "
        "this ServeCore calls itself (docs/engines.md).",
    )
    shards: ShardsConfig | None = Field(
        None,
        description="Several ServeCores that divide the sessions among them. null: this "
        "ServeCore is the only one.",
    )
    trace_path: str | None = Field(
        None,
        min_length=1,
        description="File that records the requests of programs, for `parrot simulate`. null: "
        "no recording.",
    )
    audit_path: str | None = Field(
        None,
        min_length=1,
        description="File that receives one JSON line for each action of an operator, sign-in "
        "to the page, engine that joins, changed key and failed authentication. null: no audit "
        "log.",
    )
    otlp_endpoint: str | None = Field(
        None,
        min_length=1,
        description="Address that receives traces by OTLP over HTTP, such as "
        "`http://localhost:4318/v1/traces` (docs/monitoring.md). Needs the extra `otel`. null: "
        "no traces.",
    )
    otlp_sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of traces that are sent, 0 to 1. Calls inside a caller's span follow "
        "the caller's decision. null: `OTEL_TRACES_SAMPLER` decides; by default all are sent.",
    )

    @field_validator("servers")
    @classmethod
    def _servers_differ(cls, servers: tuple[UpstreamServer, ...]) -> tuple[UpstreamServer, ...]:
        urls = [server.url for server in servers]
        if twice := [url for url in urls if urls.count(url) > 1]:
            raise ValueError(f"{twice[0]} is named twice")
        return servers

    @field_validator("prefix_repair", mode="before")
    @classmethod
    def _edits_no_prompts(cls, value: object) -> object:
        if value == "on":
            raise ValueError(
                "prompts are no longer edited. With `report`, the header `x-parrot-prefix` says "
                "which part changes with each request; move that part to the end of the prompt"
            )
        return value

    @property
    def shard(self) -> Shard:
        own = self.shards
        return ALONE if own is None else Shard(own.index, len(own.cores))

    @property
    def needs_keys(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.api_keys) or self.keys_file is not None

    @property
    def unserved_timeout_s(self) -> float:
        if self.no_engine_timeout is None:
            return self.engine_heartbeat_timeout
        return self.no_engine_timeout


def core_settings(
    file: ConfigFile, options: Mapping[str, Any], environ: Mapping[str, str]
) -> Settings:
    """ServeCore's settings from its file, the environment and the command line. Raises
    `ConfigError`."""
    return read_settings("core", file, options, environ, lambda known: CoreConfig)
