"""The async client of the endpoints at which engines register with ServeCore."""

from parrot.protocol.engine_api import (
    EngineInfo,
    HeartbeatRequest,
    HeartbeatResponse,
    LeaveRequest,
    LeaveResponse,
    RegisterRequest,
    RegisterResponse,
    RuntimeInfo,
)
from parrot.protocol.transport import Transport, read_answer

_MARGIN_S = 10.0  # Seconds that an engine waits for an answer beyond the request's timeout.


class RegistrationClient:
    """The requests that engines send to ServeCore."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def close(self) -> None:
        await self._http.close()

    async def register_engine(self, engine: EngineInfo) -> RegisterResponse:
        body = RegisterRequest(engine_config=engine).model_dump(mode="json")
        answer = await self._http.request("POST", "/register_engine", body=body)
        return read_answer(RegisterResponse, answer)

    async def engine_heartbeat(
        self,
        engine_id: int,
        engine_name: str,
        runtime_info: RuntimeInfo,
        core: str = "",
    ) -> HeartbeatResponse:
        """`core`: ServeCore's id from the registration."""
        body = HeartbeatRequest(
            engine_id=engine_id,
            engine_name=engine_name,
            runtime_info=runtime_info,
            core=core,
        ).model_dump(mode="json")
        answer = await self._http.request("POST", "/engine_heartbeat", body=body)
        return read_answer(HeartbeatResponse, answer)

    async def engine_leave(self, engine_id: int, core: str, timeout_s: float) -> LeaveResponse:
        """Stop receiving calls and wait for the running calls, for at most `timeout_s` seconds.
        `core`: ServeCore's id from the registration."""
        request = LeaveRequest(engine_id=engine_id, core=core, timeout_s=timeout_s)
        answer = await self._http.request(
            "POST",
            "/engine_leave",
            body=request.model_dump(mode="json"),
            timeout_s=timeout_s + _MARGIN_S,
        )
        return read_answer(LeaveResponse, answer)
