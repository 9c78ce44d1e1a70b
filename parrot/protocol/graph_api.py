"""Payloads of `POST /v1/semantic_graph`, a whole graph in one request, see docs/rest.md."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from parrot.protocol.gate.fields import Credential, Id, Name, Text
from parrot.protocol.public import (
    MAX_PARAMETERS,
    CallParameter,
    CallResponse,
    NativeFields,
    Payload,
    SemanticFields,
    SessionCreateRequest,
)

MAX_CALLS = 512
MAX_VARIABLES = 2048
MAX_BINDINGS = 4096  # parameters of all calls
MAX_BRACES = 8192  # double ones in all templates, which may be placeholders


class GraphVariable(Payload):
    """A new variable, for which `name` stands in the request."""

    name: Name
    content: Text | None = None
    var_name: Name | None = Field(None, description="what the session calls it; null: its `name`")


class GraphParameter(CallParameter):
    """A placeholder's binding. An input has exactly one of `var_id`, `var` and `value`, an output
    at most one of the first two."""

    names: ClassVar = ("var_id", "var")

    var: Name | None = Field(
        None,
        description="name of a declared variable, or of an output; an output may declare it",
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
    """It has one of `session_id` and `session`. `session_auth` may come as a Bearer token, and so
    may the `api_key` of `session`."""

    session_id: Id | None = None
    session_auth: Credential | None = None
    session: SessionCreateRequest | None = Field(None, description="begin a session for the graph")
    variables: list[GraphVariable] = Field([], max_length=MAX_VARIABLES)
    calls: list[GraphCall] = Field([], max_length=MAX_CALLS, description="in any order")
    idempotency_key: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _few_pieces(cls, fields: Any) -> Any:
        """Counted before any is looked at."""
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

    @model_validator(mode="after")
    def _one_session(self) -> Self:
        if (self.session_id is None) == (self.session is None):
            raise ValueError("it needs exactly one of session_id and session")
        if self.session is not None and self.idempotency_key is not None:
            raise ValueError("an idempotency_key belongs to a session that is there already")
        return self


class GraphResponse(BaseModel):
    session_id: int
    session_auth: str | None = Field(None, description="of a session that began with the graph")
    variables: dict[str, str] = Field(description="var_id by the name that the request gave")
    calls: list[CallResponse] = Field(description="in the order of the request")
