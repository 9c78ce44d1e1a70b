"""Payloads of ServeCore's REST API (`/v1`), see docs/rest.md."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    computed_field,
    model_validator,
)

from parrot.protocol.fields import (
    Credential,
    Id,
    Label,
    Name,
    PerformanceCriteria,
    Text,
    Traceparent,
)
from parrot.protocol.sampling import DefaultSampling, SamplingConfig, TokenLogprob

MAX_PARAMETERS = 1024


# Limits of one graph request.
MAX_CALLS = 512
MAX_VARIABLES = 2048
MAX_BINDINGS = 4096  # Parameters of all calls.
MAX_BRACES = 8192  # Occurrences of `{{` in all templates.


Timeout = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Payload(BaseModel):
    """Base of requests: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


class Answer(BaseModel):
    """Base of answers. Validators are built when they are first used: no process uses all."""

    model_config = ConfigDict(defer_build=True)


class SessionCreateRequest(Payload):
    api_key: Credential | None = None
    apps: list[Text] | None = Field(
        None, max_length=256, description="Names that the web page shows."
    )
    on_demand: bool = Field(False, description="Default of `on_demand` for the session's calls.")
    traceparent: Traceparent | None = Field(None, description="The caller's span (W3C).")


class SessionCreateResponse(Answer):
    session_id: int
    session_auth: str


class SessionScoped(Payload):
    """A request inside a session. `session_auth` may come as a Bearer token instead."""

    session_id: Id
    session_auth: Credential | None = None


class CallParameter(Payload):
    """The variable or text of a placeholder. An input has exactly one of `var_id` and `value`. An
    output may name an unset variable in `var_id`."""

    names: ClassVar[tuple[str, ...]] = ("var_id",)  # The fields that name a variable.

    name: Name
    is_output: bool = False
    var_id: Label | None = None
    value: Text | None = None
    sampling_config: SamplingConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        num_names = len(self.names) - list(map(self.__dict__.get, self.names)).count(None)
        if self.is_output:
            if self.value is not None:
                raise ValueError(f"output `{self.name}` must not have a value")
            if num_names > 1:
                raise ValueError(f"output `{self.name}` has both a {' and a '.join(self.names)}")
        else:
            if num_names + (self.value is not None) != 1:
                names = ", ".join(self.names)
                raise ValueError(f"input `{self.name}` needs exactly one of {names} and value")
            if self.sampling_config is not None:
                raise ValueError(f"input `{self.name}` must not have a sampling_config")
        return self


class CallFields(Payload):
    """Fields of calls of both kinds, besides their parameters."""

    output_criteria: PerformanceCriteria | None = Field(
        None, description="Run at once, as if the last output was read with these criteria."
    )
    on_demand: bool | None = Field(
        None, description="Run only when an output is needed. null: as the session's `on_demand`."
    )


class CallScope(SessionScoped):
    """Fields of requests for one call of either kind, besides the call's own."""

    parameters: list[CallParameter] = Field(max_length=MAX_PARAMETERS)
    idempotency_key: Name | None = None


class SemanticFields(CallFields):
    template: Text = Field(description="The prompt. `{{name}}` is a parameter.")
    func_name: Label | None = Field(None, description="A name for the web page and for metrics.")
    models: list[Name] = Field(
        [], max_length=64, description="Models that may serve the call. Empty: any model."
    )
    model_type: Literal["token_id", "text"] = Field("token_id", description="Has no effect.")
    remove_pure_fill: bool = Field(True, description="Drop the text after the last output.")
    cache_prefix: bool = Field(
        True, description="Other calls may reuse the KV cache of the constant prefix."
    )
    fuse_fill: bool = Field(False, description="Has no effect.")
    chat: bool = Field(False, description="Apply the chat template of the model.")
    system: Text | None = Field(None, description="System message of a new chat.")
    reuse: bool = Field(
        True,
        description="A greedy or seeded call may take the result of an identical call of its "
        "tenant.",
    )
    successor_of: Id | None = Field(
        None, description="request_id of an earlier call. This call continues its context."
    )


class SemanticCallRequest(SemanticFields, CallScope):
    pass


class NativeFields(CallFields):
    func_name: Name
    func_source: str = Field(max_length=65536, description="Python source of one `def`.")
    timeout: float = Field(
        1.0, gt=0, le=60, allow_inf_nan=False, description="Seconds that the function may run."
    )


class NativeCallRequest(NativeFields, CallScope):
    pass


class ParameterInfo(Answer):
    parameter_name: str
    is_output: bool
    var_name: str
    var_id: str


class CallResponse(Answer):
    request_id: int
    param_info: list[ParameterInfo]


class GraphVariable(Payload):
    """A new variable. Other parts of the request refer to it by `name`."""

    name: Name
    content: Text | None = None
    var_name: Name | None = Field(None, description="Its name in the session. null: `name`.")


class GraphParameter(CallParameter):
    """The variable or text of a placeholder. An input has exactly one of `var_id`, `var` and
    `value`. An output has at most one of `var_id` and `var`."""

    names: ClassVar = ("var_id", "var")

    var: Name | None = Field(
        None,
        description="Name of a variable of this request. The `var` of an output declares it.",
    )


Parameters = Annotated[list[GraphParameter], Field(max_length=MAX_PARAMETERS)]


class SemanticGraphCall(SemanticFields):
    parameters: Parameters


class NativeGraphCall(NativeFields):
    parameters: Parameters


def _kind(fields: Any) -> str:
    is_native = (
        "func_source" in fields if isinstance(fields, dict) else hasattr(fields, "func_source")
    )
    return "native" if is_native else "semantic"


GraphCall = Annotated[
    Annotated[SemanticGraphCall, Tag("semantic")] | Annotated[NativeGraphCall, Tag("native")],
    Discriminator(_kind),
]


class GraphRequest(Payload):
    """A request has either `session_id` or `session`. `session_auth` or the `api_key` of `session`
    may be the Bearer token instead."""

    session_id: Id | None = None
    session_auth: Credential | None = None
    session: SessionCreateRequest | None = Field(None, description="A new session for the graph.")
    variables: list[GraphVariable] = Field([], max_length=MAX_VARIABLES)
    calls: list[GraphCall] = Field([], max_length=MAX_CALLS, description="In any order.")
    idempotency_key: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _few_pieces(cls, fields: Any) -> Any:
        """Check the totals before the calls are validated."""
        given = fields.get("calls") if isinstance(fields, dict) else None
        calls = (
            [call for call in given if isinstance(call, dict)] if isinstance(given, list) else []
        )
        lists = [call.get("parameters") for call in calls]
        if sum(len(one) for one in lists if isinstance(one, list)) > MAX_BINDINGS:
            raise ValueError(f"its calls have more than {MAX_BINDINGS} parameters together")
        templates = [call.get("template") for call in calls]
        if sum(text.count("{{") for text in templates if isinstance(text, str)) > MAX_BRACES:
            raise ValueError(f"its templates have more than {MAX_BRACES} `{{{{` together")
        return fields

    def begins(self) -> SessionCreateRequest | None:
        """The session that the request creates. None: the request uses an existing session."""
        if self.session is None or self.session.api_key is not None:
            return self.session
        return self.session.model_copy(update={"api_key": self.session_auth})

    @model_validator(mode="after")
    def _one_session(self) -> Self:
        if (self.session_id is None) == (self.session is None):
            raise ValueError("it needs exactly one of session_id and session")
        if self.session is not None and self.idempotency_key is not None:
            raise ValueError("an idempotency_key needs an existing session: give session_id")
        return self


class GraphResponse(BaseModel):
    session_id: int
    session_auth: str | None = Field(None, description="Of a new session.")
    variables: dict[str, str] = Field(description="var_ids by name.")
    calls: list[CallResponse] = Field(description="In the order of the request.")


class VarCreateRequest(SessionScoped):
    var_name: Name
    content: Text | None = None


class VarCreateResponse(Answer):
    var_id: str


class VarSetRequest(SessionScoped):
    content: Text


class ReadLimits(SessionScoped):
    criteria: PerformanceCriteria = PerformanceCriteria.THROUGHPUT
    timeout: Timeout | None = Field(None, description="Seconds until the read fails.")
    deadline: Timeout | None = Field(
        None, description="Seconds until the program needs the value. It only changes priorities."
    )
    blocked: bool = Field(
        False, description="The program waits for this read only: start its other calls at once."
    )


class VarGetRequest(ReadLimits):
    pass


class TokenUsage(Answer):
    """Tokens of the run that generated a text."""

    prompt_tokens: int
    cached_tokens: int = Field(description="Prompt tokens that were in the KV cache.")
    output_tokens: int
    drafted_tokens: int = Field(0, description="Tokens that speculative decoding proposed.")
    accepted_tokens: int = Field(0, description="Proposed tokens that became output.")


class VarGetResponse(Answer):
    content: str
    finish_reason: Literal["stop", "length"] | None = Field(
        None,
        description="`length`: cut at `max_gen_length` or because the KV cache was full. null: a "
        "text that was set.",
    )
    stop_string: str | None = Field(None, description="The stop string that ended the text.")
    usage: TokenUsage | None = Field(None, description="null: the text was set, not generated.")
    logprobs: list[TokenLogprob] | None = Field(
        None, description="Present if the output's `sampling_config` has `logprobs`."
    )


class FirstVarsRequest(ReadLimits):
    var_ids: list[Label] = Field(
        min_length=1, max_length=MAX_PARAMETERS, description="Without duplicates."
    )
    k: int = Field(1, ge=1, le=MAX_PARAMETERS, description="At most the number of variables.")
    criteria: PerformanceCriteria = PerformanceCriteria.LATENCY

    @model_validator(mode="after")
    def _can_be_met(self) -> "FirstVarsRequest":
        if len(set(self.var_ids)) < len(self.var_ids):
            raise ValueError("a variable is given twice")
        if self.k > len(self.var_ids):
            raise ValueError(f"k is {self.k}, but there are only {len(self.var_ids)} variables")
        return self


class VarValue(VarGetResponse):
    var_id: str


class FirstVarsResponse(Answer):
    values: list[VarValue] = Field(description="`k` values, in the order in which they were ready.")


class VarInfo(Answer):
    var_id: str
    var_name: str
    state: Literal["empty", "ready", "failed"]
    producer: int | None = Field(description="request_id of the call that produces it.")
    consumers: list[int]
    error: dict[str, Any] | None = None


class VarListResponse(Answer):
    vars: list[VarInfo]


class EmptyResponse(Answer):
    pass


class CompletionInfo(Answer):
    """A call of the session. Times are seconds since the session began. null: not yet."""

    kind: Literal["semantic", "native"] = "semantic"
    request_id: int
    func_name: str
    remark: str | None = Field(None, description="Where and why the prompt left a cached prefix.")
    output: str = Field(description="Name of the output variable.")
    output_var_id: str
    outputs: list[str] = Field([], description="var_ids. A native call can have several.")
    state: str
    criteria: str | None = None
    depth: int | None = Field(None, description="Calls between this one and the output read.")
    task_group: str | None = None
    engine: str | None = None
    model: str | None = None
    attempts: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = Field(0, description="Computed tokens that had been cached before.")
    output_tokens: int = 0
    decode_s: float | None = Field(None, description="Seconds from the first token to the last.")
    finish_reason: str | None = Field(None, description="`stop` or `length`.")
    reused: bool = Field(False, description="The result of an identical call was used.")
    submitted_s: float | None = None
    activated_s: float | None = None
    ready_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None


class GraphEdge(Answer):
    source: str = Field(description="output_var_id of the producing call.")
    target: str = Field(description="output_var_id of the consuming call.")
    variable: str


class FunctionCosts(TokenUsage):
    """The finished completions of one function. `cost` follows `prices` of the configuration."""

    func_name: str
    calls: int
    cost: float


class SessionInfo(Answer):
    session_id: int
    state: Literal["active"]
    apps: list[str] = []
    age_s: float
    expires_in_s: float
    vars: list[VarInfo]
    calls: list[CompletionInfo]
    edges: list[GraphEdge]
    costs: list[FunctionCosts] = []


class SessionCounts(Answer):
    """Sums over the calls of a session."""

    turns: int = Field(description="Requests that submitted calls.")
    calls: int = Field(description="Completions and native functions.")
    done: int
    failed: int
    cancelled: int
    running: int = Field(description="Running or queued.")
    models: list[str] = Field(description="Models that ran calls.")
    prompt_tokens: int
    cached_tokens: int = Field(description="Prompt tokens that were in the KV cache.")
    output_tokens: int
    prefix_breaks: int = Field(description="Prompts that lost the prefix of the one before.")


class SessionSummary(SessionCounts):
    session_id: int
    kind: Literal["program", "conversation"] = Field(
        description="`conversation`: the session of an OpenAI or Anthropic client."
    )
    apps: list[str]
    age_s: float
    expires_in_s: float
    cached_share: float | None = Field(
        description="Cached share of the prompt tokens. null: there are none."
    )


class SessionListRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    api_key: Credential | None = None
    limit: int = Field(100, ge=1, le=1000)
    before: Id | None = Field(None, description="Only sessions older than this session_id.")


class SessionListResponse(Answer):
    """The newest first."""

    sessions: list[SessionSummary]
    has_more: bool


class ModelCard(Answer):
    """A model, with the fields that OpenAI's and Anthropic's clients read. `created` is the Unix
    time at which an engine first served it."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "parrot"
    max_model_len: int | None = Field(None, description="Tokens of prompt and output together.")
    default_sampling: DefaultSampling | None = Field(
        None, description="Values of fields that requests leave null. null: unknown."
    )
    architecture: str | None = Field(None, description="As in config.json. null: unknown.")
    type: Literal["model"] = "model"

    @computed_field
    def display_name(self) -> str:
        return self.id

    @computed_field
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created, UTC)


class ModelName(Answer):
    model_name: str
    tokenizer_name: str


class ModelsResponse(Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    models: list[ModelName]
    has_more: Literal[False] = False

    @computed_field
    def first_id(self) -> str | None:
        return self.data[0].id if self.data else None

    @computed_field
    def last_id(self) -> str | None:
        return self.data[-1].id if self.data else None


class EngineStatus(Answer):
    """An engine that is registered and alive."""

    engine_id: int
    engine_name: str
    engine_type: str
    model: str
    host: str
    port: int
    num_running: int = Field(0, description="Running completions.")
    tasks_capacity: int = Field(0, description="Maximum number of running completions.")
    needed_tokens: int = Field(0, description="KV tokens that the running completions need.")
    num_queued: int = Field(0, description="Queued completions that this engine could run.")
    used_tokens: int = Field(0, description="KV tokens in use, with cached contexts.")
    tokens_capacity: int = Field(0, description="Size of the KV cache, in tokens.")
    hit_tokens: int = Field(0, description="Prompt tokens that were in the KV cache.")
    recomputed_tokens: int = Field(0, description="Computed tokens that had been cached before.")
    evicted_tokens: int = Field(0, description="Tokens of evicted contexts.")
    default_sampling: DefaultSampling | None = Field(
        None, description="Values of fields that requests leave null. null: unknown."
    )


class DrainRequest(BaseModel):
    """`is_wanted`: true stops new calls for the engine, false allows them again."""

    is_wanted: bool


class ReadyResponse(Answer):
    """Answer of `/ready` if an engine is registered. Without the cluster token, `num_queued` and
    `engines` are null."""

    num_queued: int | None
    engines: list[EngineStatus] | None
    journal: Literal["ok", "reserve", "full"] | None = Field(
        None,
        description="`reserve`: the disk is full, so new work gets 507 and finished work is "
        "written to the reserve. `full`: nothing can be written now. null: no journal.",
    )


class StreamDelta(Answer):
    """Data of an SSE event named `delta`."""

    text: str


class StreamDone(VarGetResponse):
    """Data of the last event, `done`: the whole value. A stream that fails ends with `error`
    instead, whose data is an error payload."""
