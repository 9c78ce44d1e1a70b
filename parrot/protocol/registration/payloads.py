"""Payloads of engines that join, are alive, and leave, see docs/engine_api.md."""

from typing import Literal

from pydantic import Field, field_validator

from parrot.protocol.engine_api import EngineInfo, InternalPayload, RuntimeInfo
from parrot.protocol.gate.fields import Id, Label, Name
from parrot.protocol.gate.names import is_host, is_metadata


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
