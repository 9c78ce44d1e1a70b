"""Payloads of engines that join, are alive, and leave, see docs/engine_api.md."""

from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from parrot.protocol.engine_api import EngineInfo, InternalPayload, RuntimeInfo
from parrot.protocol.gate.fields import Amount, Id, Label, Name
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


class Lease(InternalPayload):
    """The part of an engine that a ServeCore may use, until the next lease or until it is lost."""

    model_config = ConfigDict(frozen=True)

    number: Amount = Field(0, description="one with a lower number comes late, and is ignored")
    tokens: Amount = Field(0, description="of KV")
    calls: Amount = Field(0, description="at once")
    is_wanted: bool = Field(False, description="others wait for what of it is not used")


class LeaseUse(InternalPayload):
    """The use that a ServeCore makes of a lease. `tokens` and `calls`: all that it may use until
    the next one; more than the lease has while calls run that an earlier one allowed."""

    model_config = ConfigDict(frozen=True)

    number: Amount = Field(description="of the latest lease that it has got")
    tokens: Amount
    calls: Amount
    wanted_tokens: Amount = Field(0, description="for what runs and what is queued")
    wanted_calls: Amount = 0
    least_tokens: Amount = Field(0, description="for the largest queued call")


class HeartbeatRequest(InternalPayload):
    engine_id: Id
    core: Label = Field("", description="as registered")
    engine_name: Name
    runtime_info: RuntimeInfo
    lease: Lease | None = Field(None, description="null: all of the engine")


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
    lease_use: LeaseUse | None = Field(None, description="if there is a lease")
