"""Payloads between ServeCore and engines in both directions (docs/internals/engine_protocol.md)."""

from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Base64UrlBytes, BaseModel, ConfigDict, Field, field_validator, model_validator

from parrot.protocol.fields import (
    Amount,
    BodyText,
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
CHARS_PER_TOKEN = 4  # of an engine with text contexts, which says what it holds in tokens
MAX_DRAFT_TEXTS = 16
MAX_TOKENIZER = 2**27  # characters of its definition
MAX_DRAFT_TOKENS = 131_072

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
"""Ids that a part may have."""


_ID_BYTES = array("I").itemsize


class FillPiece(InternalPayload):
    """Append tokens (or text, for engines whose contexts are text) to a context.

    The first use of `context_id` forks it from its parent: it then begins with the parent's first
    `parent_len` tokens (characters on text engines; null: all of the parent's). A fork shares the
    parent's KV; it waits until the parent has computed that much."""

    context_id: ContextId
    parent_context_id: int = Field(NO_PARENT, ge=NO_PARENT, le=2**53)
    parent_len: Amount | None = None
    token_ids: TokenIds | None = None
    text: BodyText | None = None
    public_len: Amount = Field(0, description="of a new root's first tokens: all salts share them")


class JobRequest(InternalPayload):
    """Ids for logs and cancellation, and the place in the engine's queue (lower runs first)."""

    session_id: Id = 0
    task_id: Id = 0
    attempt: Amount = Field(0, description="of the task, in all engines; 0: it has none")
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str = Field("", max_length=1024, description="whose contexts and KV it may use")
    tenant: Label = Field("", description="who shares the engine with others")
    weight: float = Field(1.0, ge=1e-6, le=1e9, description="of the tenant, beside others")
    step_growth: Quantity | None = Field(None, description="part that others may add to steps")
    traceparent: Label = Field("", description="W3C: the span above; empty: none")


class FillRequest(JobRequest, FillPiece):
    """`background`: nobody waits for it yet. It gets what other work leaves over, and fails with
    `out_of_memory` if it would need memory that is in use. As soon as a request continues or forks
    its context, it is work like any other."""

    background: bool = False
    background_share: float = Field(
        0.02, ge=0, le=1, description="how much longer it may make steps of others, on average"
    )
    end_flag: bool = Field(False, description="last job of its task; a hint, free to ignore")


class FillResponse(InternalPayload):
    filled_len: int = Field(description="tokens (characters on text engines) appended")
    cached_tokens: int = Field(0, description="tokens whose KV was already there")
    computed_tokens: int = Field(0, description="tokens whose KV this request computed")


class DraftSources(InternalPayload):
    """Text that an output may repeat. An engine that drafts verifies several of its tokens in one
    step; what it generates is the same with any sources, and without."""

    model_config = ConfigDict(frozen=True)

    in_context: bool = Field(True, description="the context that is generated on")
    texts: Annotated[tuple[TokenIds, ...], Field(max_length=MAX_DRAFT_TEXTS)] = Field(
        (), description="other texts, of 131,072 tokens together at most"
    )

    @model_validator(mode="after")
    def _is_bounded(self) -> "DraftSources":
        if sum(map(len, self.texts)) > MAX_DRAFT_TOKENS:
            raise ValueError(f"`texts` have more than {MAX_DRAFT_TOKENS} tokens")
        return self


class GenerateRequest(JobRequest):
    """Generate on a context. `fills` run first, in order, as if sent to /fill: one exchange for a
    whole completion. A piece without a `context_id` is for the request's context. The piece that
    creates a context decides on its parent; a later one, and the request, may only repeat it."""

    context_id: ContextId
    parent_context_id: int = Field(NO_PARENT, ge=NO_PARENT, le=2**53)
    parent_len: Amount | None = None
    end_flag: bool = Field(False, description="last job of its task; a hint, free to ignore")
    fills: list[FillPiece] = Field([], max_length=4096)
    sampling_config: SamplingConfig = SamplingConfig()
    resumed_ids: TokenIds = Field(
        [],
        description="the last tokens of the context, if an output began with them elsewhere: its "
        "text, its grammar and its penalties go on behind them",
    )
    conversation: JsonObject | None = Field(
        None,
        description="OpenAI's, for servers that render it in place of the context's text; calls of "
        "tools come as text: `<tool_call>` JSON `</tool_call>`",
    )
    drafts: DraftSources | None = Field(
        None, description="where the engine may look for what comes next; null: in the context"
    )
    channel: str = Field(
        "", max_length=64, description="where /generate sends what it has, if that is open"
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
    """Tokens and seconds that a request took, and (`steps`; zero: unknown) the work of the engine
    from its first step to its last."""

    cached_tokens: Amount = Field(0, description="prompt tokens whose KV was already there")
    host_tokens: Amount = Field(0, description="of these, brought back from the host")
    computed_tokens: Amount = Field(0, description="prompt tokens computed for this request")
    output_tokens: Amount = 0
    drafted_tokens: Amount = Field(0, description="verified by steps that computed several at once")
    accepted_tokens: Amount = Field(0, description="of these, that became output tokens")
    queue_s: Quantity = 0.0
    prefill_s: Quantity = 0.0
    decode_s: Quantity = 0.0
    steps: Amount = 0
    step_sequences: Amount = Field(0, description="of these steps, added up")
    step_prompt_tokens: Amount = Field(0, description="computed by these steps, for any request")


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class GenerateResponse(InternalPayload):
    """`generated_ids` are all the tokens that are now in the context, including the stop token;
    `generated_text` ends before it. Text engines give no ids."""

    generated_text: str
    generated_ids: TokenIds
    finish_reason: FinishReason
    stop_string: str | None = Field(None, description="the one that ended the text, if one did")
    usage: Usage
    logprobs: WireLogprobs | None = Field(
        None, description="of all of `generated_ids`, if they were asked for"
    )


PoolingKind = Literal["mean", "last"]


class EmbedRequest(JobRequest):
    """Ask for an embedding of each input: its tokens (or text, which the engine tokenizes as it
    does that of a fill). Nothing of it is kept."""

    inputs: list[TokenIds | BodyText] = Field(min_length=1, max_length=4096)


class EmbedResponse(InternalPayload):
    """`embeddings`: in the order of the inputs, of length 1: base64 of little-endian float32."""

    embeddings: list[str]
    prompt_tokens: int = Field(0, description="of all inputs")


class ScoreRequest(EmbedRequest):
    """Ask how likely the tokens of each input are, each behind those before it, and for `num_top`
    of the most likely ones in its place. Nothing of it is kept."""

    num_top: int = Field(0, ge=0, le=MAX_LOGPROBS)


class ScoreResponse(InternalPayload):
    """`logprobs`: a row for each token of an input, in the order of the inputs. Nothing is before
    an input's first token: its row has the number 0, and no likely ones."""

    logprobs: list[WireLogprobs]
    prompt_tokens: int = Field(0, description="of all inputs")


class StreamChunk(InternalPayload):
    """An SSE event named `chunk` of /generate_stream. The last events are `done` with a
    GenerateResponse, or `error` with an error payload."""

    ids: TokenIds
    text: str
    logprobs: WireLogprobs | None = Field(None, description="of `ids`, if they were asked for")


class FollowRequest(InternalPayload):
    """Ask for the output that a /generate makes on this context, from its first token on. It is
    waited for if it has not begun."""

    context_id: ContextId


class FollowResponse(InternalPayload):
    """The output has ended; the answer of /generate says how."""


class ChannelRequest(InternalPayload):
    """Open a channel, on which the pieces of all outputs come whose requests name it: one stream
    and, for a step of the engine, one event, however many outputs there are. Its first event is
    `open`."""

    channel: str = Field(min_length=1, max_length=64)


class ContextChunk(StreamChunk):
    """A piece of the output on this context."""

    context_id: ContextId


class ChannelChunks(InternalPayload):
    """An SSE event named `chunks` of /channel: what has come since the last, in order."""

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
    """Seconds that an engine's step takes: the sum over what is in it. The defaults
    are those of a model of 7 to 8 billion parameters on a current GPU."""

    model_config = ConfigDict(frozen=True)

    step_s: float = Field(
        4.3e-3, gt=0.0, le=1e9, description="each step, above all to read the weights"
    )
    sequence_s: Quantity = Field(3e-5, description="each sequence of the step")
    token_s: Quantity = Field(4e-8, description="each token read, shared ones once")
    prefill_s: Quantity = Field(2.2e-5, description="each prompt token computed")
    host_token_s: Quantity = Field(
        0.0, description="each token whose KV comes back from the host; 0: not known"
    )

    def decode_step_s(self, num_sequences: float, num_tokens: float) -> float:
        """Seconds of a step without prompts."""
        return self.step_s + num_sequences * self.sequence_s + num_tokens * self.token_s


class HostTierInfo(InternalPayload):
    """KV that an engine keeps on its host. Bytes and failures are counted from its start."""

    num_max_blocks: Amount
    num_free_blocks: Amount = Field(description="blank ones; KV gives way in the others")
    stored_bytes: Amount = Field(0, description="copied to the host")
    returned_bytes: Amount = Field(0, description="copied back")
    failed_transfers: Amount = 0


class PromptTokens(InternalPayload):
    """Tokens of the prompts of all requests that have ended well, by where their KV was found."""

    device: Amount = 0
    host: Amount = 0
    nowhere: Amount = Field(0, description="computed")


SERVER_FEATURES = frozenset({"messages", "tools"})
FEATURES = SERVER_FEATURES | {"cache_salt", "cached_tokens", "cancellation", "priority"}
"""Beside fields of a sampling config: the engine renders conversations, with tools; shares KV
within a salt only, tells how many tokens it had, stops when told to, heeds priorities all along."""


class Capabilities(InternalPayload):
    """Abilities of an engine, or of the server behind it, and the KV of prompts that this keeps."""

    model_config = ConfigDict(frozen=True)

    server: Path = Field(
        "", description="name and version of the server behind it, if there is one"
    )
    features: frozenset[Label] | None = Field(
        None,
        max_length=256,
        description="fields of the sampling config, `messages`, `tools`, `cache_salt`, "
        "`cached_tokens`, `cancellation`, `priority`; null: not known",
    )
    kept_tokens: Amount | None = Field(None, description="of KV, by the server; null: not known")
    kept_prompts: Positive | None = Field(None, description="with KV, at once; null: any number")


class ServerLoad(InternalPayload):
    """Load of the server behind an engine, as that tells it. Others may use it too."""

    model_config = ConfigDict(frozen=True)

    num_running: Amount = Field(0, description="requests of all clients that it computes")
    num_waiting: Amount = Field(0, description="requests of all clients that wait there")
    num_others: Amount = Field(0, description="of these, those that the engine did not send")
    kv_usage: float | None = Field(None, ge=0, le=1, description="used part of its KV cache")
    other_tokens: Amount = Field(0, description="others' part of that, by their requests")


class OutputPart(BaseModel):
    """Tokens of the output on this context, from number `start` on: their ids as 32-bit numbers,
    little-endian, in base64."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    context_id: Amount
    start: Amount
    ids: Base64UrlBytes = Field(max_length=2**16)  # characters: `MOST_IDS`

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
    kv_dtype: Label = Field("", description="type of the KV pool's numbers; empty: not known")
    model_mem: Quantity = 0.0
    recent_average_latency: Quantity = 0.0
    num_steps: Amount | None = Field(
        None,
        description="if they stand still while it has work, it is lost; null: not counted",
    )
    costs: StepCosts | None = Field(None, description="as measured; null: not known")
    capabilities: Capabilities | None = Field(None, description="null: as it registered")
    host_tier: HostTierInfo | None = None
    server_load: ServerLoad | None = Field(None, description="null: not told, or too old")
    num_ranks: Positive = Field(
        1, description="processes that the model is divided among; memory is that of one"
    )
    prompt_tokens: PromptTokens = PromptTokens()
    outputs: list[OutputPart] = Field(
        [], max_length=65536, description="what is new of those that are not streamed"
    )


class PingResponse(InternalPayload):
    runtime_info: RuntimeInfo
    incarnation: str = Field("", description="that of the engine's registration")


class SpecialIds(InternalPayload):
    """`add_bos`: the model wants `bos` once, before the first token of a prompt."""

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
    device: Label = Field("", description="what runs the model; empty: not known")
    tokenizer: Path = ""
    tokenizer_id: Label | None = None
    host: Path
    port: int = Field(ge=1, le=65535)
    max_seq_len: Positive
    tasks_capacity: Positive = 256
    tokens_capacity: Positive = Field(description="tokens of KV the engine can hold")
    host_tokens_capacity: Amount = Field(0, description="tokens of KV, on its host besides")
    block_size: Positive = 1
    costs: StepCosts | None = Field(None, description="of its steps so far; null: not known")
    capabilities: Capabilities = Capabilities()
    default_sampling: DefaultSampling | None = Field(
        None, description="for what a request does not set; null: its server's, not known"
    )
    incarnation: str = Field(
        "",
        max_length=256,
        description="a secret of this start of the engine, which lets it register again while "
        "ServeCore believes it to be there; others of its name and address get 409 till it is lost",
    )
    registration: str = Field(
        "", max_length=99, pattern=r"^[\w-]*$", description="requests repeat its name"
    )


class RegisterRequest(InternalPayload):
    engine_config: EngineInfo

    @field_validator("engine_config")
    @classmethod
    def _can_be_called(cls, info: EngineInfo) -> EngineInfo:
        if not is_host(info.host):
            raise ValueError("`host` must be an IP address or a DNS name, at which the engine is")
        if is_metadata(info.host):
            raise ValueError("`host` is no engine's, but a metadata service's")
        return info


class RegisterResponse(InternalPayload):
    engine_id: int
    core: str = Field("", description="this start of ServeCore; each heartbeat repeats it")
    epoch: int = Field(0, description="greater than that of any ServeCore that was here before")
    lease_s: float | None = Field(None, gt=0, description="without an answer all work ends so soon")


class HeartbeatRequest(InternalPayload):
    engine_id: Id
    core: Label = Field("", description="as registered")
    engine_name: Name
    runtime_info: RuntimeInfo


class LeaveRequest(InternalPayload):
    """An engine is about to end."""

    engine_id: Id
    core: Label = Field("", description="as registered")
    timeout_s: float = Field(ge=0, le=86400, description="for the calls that it has")


class LeaveResponse(InternalPayload):
    num_calls: int = Field(ge=0, description="that had not ended, and run elsewhere")


class HeartbeatResponse(InternalPayload):
    """`unknown`: ServeCore restarted or gave the engine up; register again."""

    state: Literal["ok", "unknown"] = "ok"
