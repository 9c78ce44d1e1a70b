"""Payloads between ServeCore and engines in both directions (docs/internals/engine_protocol.md)."""

from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Base64UrlBytes, BaseModel, ConfigDict, Field, field_validator, model_validator

from parrot.protocol.fields import (
    Amount,
    BodyText,
    Credential,
    Id,
    JsonObject,
    Label,
    Name,
    Path,
    Positive,
    Quantity,
    Text,
    TokenIds,
)
from parrot.protocol.sampling import MAX_LOGPROBS, DefaultSampling, SamplingConfig, WireLogprobs
from parrot.utils.addresses import is_host, is_metadata

NO_PARENT = -1
CHARS_PER_TOKEN = 4  # Engines with text contexts use this ratio to report capacities in tokens.
MAX_DRAFT_TEXTS = 16  # Texts in one `DraftSources`.
MAX_TOKENIZER = 2**27  # Characters of a tokenizer.json.
MAX_DRAFT_TOKENS = 131_072  # Tokens of all texts in one `DraftSources`.

ContextId = Amount


class InternalPayload(BaseModel):
    """A newer peer may send more fields than this side knows; they are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, defer_build=True)


class EngineType(StrEnum):
    BUILTIN = "builtin"
    OPENAI = "openai"
    HUGGINGFACE = "huggingface"
    SIM = "sim"


MOST_IDS = 12_288
"""Maximum number of token ids in an `OutputPart`."""


_ID_BYTES = array("I").itemsize


class FillPiece(InternalPayload):
    """Append tokens (or text, for engines whose contexts are text) to a context.

    The first use of `context_id` forks it from its parent: it then begins with the parent's first
    `parent_len` tokens (characters on text engines; null: all of the parent's). A fork shares the
    parent's KV. It waits until the parent has computed these tokens."""

    context_id: ContextId
    parent_context_id: int = Field(NO_PARENT, ge=NO_PARENT, le=2**53)
    parent_len: Amount | None = None
    token_ids: TokenIds | None = None
    text: BodyText | None = None
    public_len: Amount = Field(0, description="first tokens of a new root that all salts share")


class JobRequest(InternalPayload):
    """Ids for logs and cancellation, and the position in the engine's queue (lower runs first)."""

    session_id: Id = 0
    task_id: Id = 0
    attempt: Amount = Field(0, description="of the task, over all engines; 0: not counted")
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=1024, description="KV is shared within a salt")
    tenant: Label = Field("", description="tenant of the call")
    weight: float = Field(1.0, ge=1e-6, le=1e9, description="weight of the tenant")
    step_growth: Quantity | None = Field(
        None, description="by how much other tenants may slow down its steps; 0.25: 25%"
    )
    traceparent: Label = Field("", description="W3C trace context of the parent span; empty: none")
    request_id: Label = Field("", description="id of the client's request, for a foreign server")
    client_key: Credential = Field("", exclude=True, repr=False, description="in one process only")


class FillRequest(JobRequest, FillPiece):
    """A `background` fill has no waiting client. It uses idle capacity, and fails with
    `out_of_memory` if it needs memory that is in use. When a request continues or forks its
    context, it becomes a normal fill."""

    background: bool = False
    background_share: float = Field(
        0.02, ge=0, le=1, description="fraction by which it may lengthen steps of other jobs"
    )
    end_flag: bool = Field(False, description="last job of its task; engines may ignore this hint")


class FillResponse(InternalPayload):
    filled_len: int = Field(description="tokens (characters on text engines) appended")
    cached_tokens: int = Field(0, description="tokens whose KV was cached")
    computed_tokens: int = Field(0, description="tokens whose KV this request computed")


class DraftSources(InternalPayload):
    """Text that an output may repeat. An engine that drafts verifies several of its tokens in one
    step. Drafts do not change the output."""

    model_config = ConfigDict(frozen=True)

    in_context: bool = Field(True, description="draft from the context itself")
    texts: Annotated[tuple[TokenIds, ...], Field(max_length=MAX_DRAFT_TEXTS)] = Field(
        (), description="other texts, of 131,072 tokens together at most"
    )

    @model_validator(mode="after")
    def _is_bounded(self) -> "DraftSources":
        if sum(map(len, self.texts)) > MAX_DRAFT_TOKENS:
            raise ValueError(f"`texts` have more than {MAX_DRAFT_TOKENS} tokens")
        return self


class GenerateRequest(JobRequest):
    """Generate on a context. `fills` run first, in order, as if sent to /fill. A piece without a
    `context_id` belongs to the request's context. The piece that creates a context sets its parent.
    Later pieces and the request may only repeat the parent."""

    context_id: ContextId
    parent_context_id: int = Field(NO_PARENT, ge=NO_PARENT, le=2**53)
    parent_len: Amount | None = None
    end_flag: bool = Field(False, description="last job of its task; engines may ignore this hint")
    fills: list[FillPiece] = Field([], max_length=4096)
    sampling_config: SamplingConfig = SamplingConfig()
    resumed_ids: TokenIds = Field(
        [],
        description="last tokens of the context that another engine has generated: text, grammar "
        "and penalties continue after them",
    )
    conversation: JsonObject | None = Field(
        None,
        description="messages in OpenAI's format, for servers that apply a chat template; tool "
        "calls are returned as text: `<tool_call>` JSON `</tool_call>`; or `prompt`, token ids",
    )
    drafts: DraftSources | None = Field(
        None, description="sources of draft tokens; null: the context"
    )
    channel: str = Field(
        "", max_length=64, description="open channel that receives the output of /generate"
    )

    @model_validator(mode="before")
    @classmethod
    def _complete_pieces(cls, payload: Any) -> Any:
        if not isinstance(payload, dict) or not isinstance(payload.get("fills"), list):
            return payload
        keys = ("context_id", "parent_context_id", "parent_len")
        own = {key: payload[key] for key in keys if key in payload}
        fills = [
            own | fill if isinstance(fill, dict) and "context_id" not in fill else fill
            for fill in payload["fills"]
        ]
        return payload | {"fills": fills}


class Usage(InternalPayload):
    """Tokens and seconds of a request. `steps` and the fields after it count the engine's work from
    the request's first step to its last (0: unknown)."""

    cached_tokens: Amount = Field(0, description="prompt tokens whose KV was cached")
    host_tokens: Amount = Field(0, description="of these, copied back from CPU memory")
    computed_tokens: Amount = Field(0, description="prompt tokens computed for this request")
    output_tokens: Amount = 0
    drafted_tokens: Amount = Field(0, description="draft tokens that steps verified")
    accepted_tokens: Amount = Field(0, description="draft tokens that became output")
    queue_s: Quantity = 0.0
    prefill_s: Quantity = 0.0
    decode_s: Quantity = 0.0
    steps: Amount = 0
    step_sequences: Amount = Field(0, description="sequences of these steps, added up")
    step_prompt_tokens: Amount = Field(
        0, description="prompt tokens of these steps, of all requests"
    )


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class GenerateResponse(InternalPayload):
    """`generated_ids` are all generated tokens in the context, including the stop token.
    `generated_text` ends before the stop token. Text engines return no ids."""

    generated_text: str
    generated_ids: TokenIds
    finish_reason: FinishReason
    stop_string: str | None = Field(None, description="stop string that ended the text")
    usage: Usage
    logprobs: WireLogprobs | None = Field(None, description="of all `generated_ids`, if requested")
    extra: JsonObject | None = Field(None, description="other fields of a foreign server's answer")


PoolingKind = Literal["mean", "last"]


class EmbedRequest(JobRequest):
    """Compute an embedding of each input, given as tokens or text. The engine keeps no KV of it."""

    inputs: list[TokenIds | BodyText] = Field(min_length=1, max_length=4096)
    extra: JsonObject | None = Field(None, description="further fields for a foreign server")


class EmbedResponse(InternalPayload):
    """`embeddings`: in the order of the inputs, normalized: base64 of little-endian float32."""

    embeddings: list[str]
    prompt_tokens: int = Field(0, description="of all inputs")


class ScoreRequest(EmbedRequest):
    """Compute the log probability of each input token after the tokens before it, and of the
    `num_top` most likely tokens in its place. The engine keeps no KV of it."""

    num_top: int = Field(0, ge=0, le=MAX_LOGPROBS)


class ScoreResponse(InternalPayload):
    """`logprobs`: a row for each token of an input, in the order of the inputs. The row of an
    input's first token has the value 0 and no likely tokens."""

    logprobs: list[WireLogprobs]
    prompt_tokens: int = Field(0, description="of all inputs")


class StreamChunk(InternalPayload):
    """An SSE event named `chunk` of /generate_stream. The last events are `done` with a
    GenerateResponse, or `error` with an error payload."""

    ids: TokenIds
    text: str
    logprobs: WireLogprobs | None = Field(None, description="of `ids`, if requested")


class FollowRequest(InternalPayload):
    """Stream the output that a /generate produces on this context, from its first token. The stream
    waits if the output has not begun."""

    context_id: ContextId


class FollowResponse(InternalPayload):
    """The output has finished; the response of /generate says how."""


class ChannelRequest(InternalPayload):
    """Open a channel: one stream for the output chunks of all requests that name the channel. Each
    step of the engine sends one event for all outputs. The first event is `open`."""

    channel: str = Field(min_length=1, max_length=64)


class ContextChunk(StreamChunk):
    """A chunk of the output on this context."""

    context_id: ContextId


class ChannelChunks(InternalPayload):
    """An SSE event named `chunks` of /channel: all chunks since the previous event, in order."""

    chunks: list[ContextChunk]


class FreeContextRequest(InternalPayload):
    context_id: ContextId | None = None
    context_ids: list[ContextId] = Field([], max_length=65536)

    @model_validator(mode="after")
    def _names_something(self) -> "FreeContextRequest":
        if self.context_id is None and "context_ids" not in self.model_fields_set:
            raise ValueError("give context_id or context_ids")
        return self


class FreeContextResponse(InternalPayload):
    context_len: int = Field(description="tokens of the freed contexts; unknown ids count 0")


class StepCosts(InternalPayload):
    """Seconds of an engine's step, as a sum of the following costs. The defaults are
    those of a model with 7 to 8 billion parameters on a current GPU."""

    model_config = ConfigDict(frozen=True)

    step_s: float = Field(
        4.3e-3, gt=0.0, le=1e9, description="each step, mostly reading the weights"
    )
    sequence_s: Quantity = Field(3e-5, description="each sequence of the step")
    token_s: Quantity = Field(4e-8, description="each token of KV read; shared KV counts once")
    prefill_s: Quantity = Field(2.2e-5, description="each prompt token computed")
    host_token_s: Quantity = Field(
        0.0, description="each token of KV copied back from CPU memory; 0: unknown"
    )

    def decode_step_s(self, num_sequences: float, num_tokens: float) -> float:
        """Seconds of a step without prompts."""
        return self.step_s + num_sequences * self.sequence_s + num_tokens * self.token_s


class HostTierInfo(InternalPayload):
    """KV that an engine keeps in CPU memory. Bytes and failures count from the engine's start."""

    num_max_blocks: Amount
    num_free_blocks: Amount = Field(description="empty blocks")
    stored_bytes: Amount = Field(0, description="copied to CPU memory")
    returned_bytes: Amount = Field(0, description="copied back to the GPU")
    failed_transfers: Amount = 0


class WindowSlots(InternalPayload):
    """KV blocks of the layers with sliding windows."""

    num_slots: Amount
    num_held: Amount = Field(0, description="that running contexts need")
    num_kept: Amount = Field(0, description="at points where another context may continue")
    window: Amount = Field(0, description="tokens of the largest window")


class PromptTokens(InternalPayload):
    """Prompt tokens of all finished requests, by the place where their KV was found."""

    device: Amount = 0
    host: Amount = 0
    nowhere: Amount = Field(0, description="computed")


SERVER_FEATURES = frozenset({"messages", "tools"})
FEATURES = SERVER_FEATURES | {"cache_salt", "cached_tokens", "cancellation", "priority"}
"""Features besides the fields of a sampling config. `messages`, `tools`: the engine renders
conversations, with tools. `cache_salt`: it shares KV only within a salt. `cached_tokens`: it
reports cached tokens. `cancellation`: it stops cancelled requests. `priority`: it schedules by
priority."""


class Capabilities(InternalPayload):
    """Features of an engine or its foreign server, and the size of that server's prefix cache."""

    model_config = ConfigDict(frozen=True)

    server: Path = Field("", description="name and version of the foreign server, if any")
    features: frozenset[Label] | None = Field(
        None,
        max_length=256,
        description="fields of the sampling config, `messages`, `tools`, `cache_salt`, "
        "`cached_tokens`, `cancellation`, `priority`; null: unknown",
    )
    kept_tokens: Amount | None = Field(None, description="tokens in that cache; null: unknown")
    kept_prompts: Positive | None = Field(None, description="prompts in that cache; null: no limit")


class ServerLoad(InternalPayload):
    """Load of a foreign server, as it reports it. Other clients may use the server."""

    model_config = ConfigDict(frozen=True)

    num_running: Amount = Field(0, description="running requests of all clients")
    num_waiting: Amount = Field(0, description="waiting requests of all clients")
    num_others: Amount = Field(0, description="running and waiting requests of other clients")
    kv_usage: float | None = Field(None, ge=0, le=1, description="used fraction of its KV cache")
    other_tokens: Amount = Field(0, description="estimated KV tokens of other clients")


class OutputPart(BaseModel):
    """Tokens of the output on this context, from index `start`: their ids as 32-bit little-endian
    numbers in base64."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    context_id: Amount
    start: Amount
    ids: Base64UrlBytes = Field(max_length=2**16)  # The characters of `MOST_IDS` ids.

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


class RuntimeInfo(InternalPayload):
    """An engine's state. Memory in MiB, `recent_average_latency` in ns per step."""

    num_cached_tokens: Amount = 0
    num_max_blocks: Amount = 0
    num_free_blocks: Amount = 0
    block_size: Amount = 1
    num_running_jobs: Amount = 0
    num_total_jobs: Amount = 0
    cache_mem: Quantity = 0.0
    kv_dtype: Label = Field("", description="number type of the KV cache; empty: unknown")
    model_mem: Quantity = 0.0
    recent_average_latency: Quantity = 0.0
    num_steps: Amount | None = Field(
        None,
        description="an engine that has work is lost if this count stays the same; null: unknown",
    )
    costs: StepCosts | None = Field(None, description="as measured; null: unknown")
    capabilities: Capabilities | None = Field(None, description="null: as registered")
    host_tier: HostTierInfo | None = None
    window_slots: WindowSlots | None = Field(None, description="null: blocks have all KV")
    server_load: ServerLoad | None = Field(None, description="null: not reported, or too old")
    num_ranks: Positive = Field(
        1, description="processes that share the model; memory is per process"
    )
    last_warning: Label = Field("", description="last warning or error in the engine's log")
    warned_at: Quantity | None = Field(None, description="its Unix time")
    prompt_tokens: PromptTokens = PromptTokens()
    outputs: list[OutputPart] = Field(
        [], max_length=65536, description="new tokens of outputs that are not streamed"
    )


class PingResponse(InternalPayload):
    runtime_info: RuntimeInfo
    incarnation: str = Field("", description="as registered")


class SpecialIds(InternalPayload):
    """`add_bos`: a prompt begins with `bos`."""

    bos: int | None = None
    eos: list[int] = Field([], max_length=4096)
    add_bos: bool = False


class TokenizerResponse(InternalPayload):
    tokenizer_json: str = Field(max_length=MAX_TOKENIZER)
    chat_template: Text | None = None
    special_ids: SpecialIds
    vocab_size: int


class EngineInfo(InternalPayload):
    """Description of an engine, sent to ServeCore when it registers.

    `tokenizer_id` is the SHA-256 of its tokenizer.json; null: its contexts are text."""

    engine_type: EngineType
    engine_name: Name
    model: Path
    device: Label = Field("", description="name of the device; empty: unknown")
    architecture: Label = Field("", description="as in config.json; empty: unknown")
    tokenizer: Path = ""
    tokenizer_id: Label | None = None
    host: Path
    port: int = Field(ge=1, le=65535)
    max_seq_len: Positive
    tasks_capacity: Positive = 256
    tokens_capacity: Positive = Field(description="tokens of KV the engine can hold")
    host_tokens_capacity: Amount = Field(0, description="further tokens of KV in CPU memory")
    block_size: Positive = 1
    costs: StepCosts | None = Field(None, description="measured costs of its steps; null: unknown")
    capabilities: Capabilities = Capabilities()
    default_sampling: DefaultSampling | None = Field(
        None, description="for fields that a request does not set; null: unknown"
    )
    incarnation: str = Field(
        "",
        max_length=256,
        description="random id of this start of the engine; while it is registered, another engine "
        "with its name and address gets 409",
    )
    registration: str = Field(
        "", max_length=99, pattern=r"^[\w-]*$", description="ServeCore repeats it in a header"
    )


class RegisterRequest(InternalPayload):
    engine_config: EngineInfo

    @field_validator("engine_config")
    @classmethod
    def _can_be_called(cls, info: EngineInfo) -> EngineInfo:
        if not is_host(info.host):
            raise ValueError("`host` must be an IP address or a DNS name of the engine")
        if is_metadata(info.host):
            raise ValueError("`host` is the address of a cloud metadata service, not of an engine")
        return info


class RegisterResponse(InternalPayload):
    engine_id: int
    core: str = Field("", description="id of this start of ServeCore; heartbeats repeat it")
    epoch: int = Field(0, description="greater than the epoch of all earlier ServeCores")
    lease_s: float | None = Field(None, gt=0, description="all work ends after this silence")


class HeartbeatRequest(InternalPayload):
    engine_id: Id
    core: Label = Field("", description="as registered")
    engine_name: Name
    runtime_info: RuntimeInfo


class LeaveRequest(InternalPayload):
    """An engine is about to stop."""

    engine_id: Id
    core: Label = Field("", description="as registered")
    timeout_s: float = Field(ge=0, le=86400, description="maximum wait for its running calls")


class LeaveResponse(InternalPayload):
    num_calls: int = Field(ge=0, description="unfinished calls that move to other engines")


class HeartbeatResponse(InternalPayload):
    """`unknown`: ServeCore restarted, or it considers the engine lost. Register again."""

    state: Literal["ok", "unknown"] = "ok"
