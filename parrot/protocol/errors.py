"""All errors that a user or another process can receive, with their HTTP statuses.

    ParrotError
    |-- InvalidRequest            400  malformed or contradictory request
    |   |-- UnsupportedField      400  a known field that is not supported (`param` names it)
    |   `-- PromptTooLong         400  longer than the model or the KV pool allows
    |-- ValidationFailed          422  a field of the wrong type or out of bounds
    |-- AuthenticationFailed      401  missing or wrong api key, session_auth or cluster token
    |-- PermissionDenied          403  a key without the required scope
    |-- NotFound                  404  no such session, variable, request, context, model or path
    |-- MethodNotAllowed          405
    |-- Conflict                  409  idempotency key reused for another request
    |   |-- AlreadySet            409  a variable is write-once
    |   |-- CyclicGraph           409  the call would close a cycle (names the variables)
    |   `-- StaleCore             409  the engine belongs to another ServeCore (engines only)
    |-- SessionGone               410  expired or deleted
    |-- PayloadTooLarge           413
    |-- UnsupportedMediaType      415  a body that is not declared as application/json
    |-- MisdirectedRequest        421  for a host name that is not the server's
    |-- QuotaExceeded             429  too many sessions, a provider's limit, ...
    |   `-- QueueFull             429  nothing was done: the client may retry the request
    |       |-- RateLimited       429  retry after the seconds of `Retry-After`
    |       `-- ClusterFull       503  all tenants together have filled the queue
    |-- Cancelled                 499  the reader or its program cancelled the work
    |-- InternalError             500  a defect; details are only in the server's log
    |-- CallFailed                502  a producer failed, so this value will never exist
    |   |-- EngineFailed          502  the engine could not run the completion
    |   |   `-- ModelNumerics     502  NaN or Inf in the logits
    |   `-- NativeFunctionFailed  502  raised, never set an output, or exceeded time or memory
    |-- Unavailable               503  the server cannot be reached or is shutting down
    |   |-- NoEngine              503  no live engine can serve the model
    |   |-- OutOfMemory           503  not enough free KV blocks now; may work later
    |   `-- Standby               503  another ServeCore serves, and this one waits to take over
    |-- TimedOut                  504  the read's timeout passed
    `-- InsufficientStorage       507  the journal cannot be written; the work may have been done

Servers raise these classes and send them as `{"error": {"type", "message", "param"?}}`. Clients
raise the same classes again.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class ParrotError(Exception):
    """Base of all errors. `message` is shown to users. `param` names the invalid field, if any.

    The `type` of a class in this module is its name in snake case. Subclasses in other modules
    inherit `type` and `status`, so clients raise their parent class."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "parrot_error"
    # The error is the result of a call, so the same request always receives it again.
    is_final: bool = False
    code: str | None = None  # Of a foreign server's error. It is not sent to other processes.

    def __init_subclass__(cls, *, status: int | None = None) -> None:
        if cls.__module__ == __name__:
            cls.type = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if status is not None:
            cls.status = status

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def again(self) -> Self:
        """A copy to raise, for an error that is stored and raised several times. Raising the stored
        error would attach a traceback to it, which keeps all frames and their objects alive."""
        other = type(self).__new__(type(self), *self.args)  # `__init__` may need more arguments.
        vars(other).update(vars(self))
        other.__cause__ = self.__cause__
        return other

    def to_payload(self) -> dict[str, Any]:
        error: dict[str, Any] = {"type": self.type, "message": self.message}
        if self.param is not None:
            error["param"] = self.param
        return {"error": error}


class InvalidRequest(ParrotError, status=400): ...


class UnsupportedField(InvalidRequest): ...


class PromptTooLong(InvalidRequest): ...


class ValidationFailed(ParrotError, status=422): ...


class AuthenticationFailed(ParrotError, status=401): ...


class PermissionDenied(ParrotError, status=403): ...


class NotFound(ParrotError, status=404): ...


class MethodNotAllowed(ParrotError, status=405): ...


class Conflict(ParrotError, status=409): ...


class AlreadySet(Conflict): ...


class CyclicGraph(Conflict): ...


class StaleCore(Conflict): ...


class SessionGone(ParrotError, status=410): ...


class PayloadTooLarge(ParrotError, status=413): ...


class UnsupportedMediaType(ParrotError, status=415): ...


class MisdirectedRequest(ParrotError, status=421): ...


class QuotaExceeded(ParrotError, status=429):
    """`retry_after_s`: seconds after which the client may retry. None: unknown."""

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class QueueFull(QuotaExceeded): ...


class RateLimited(QueueFull): ...


class ClusterFull(QueueFull, status=503): ...


class Cancelled(ParrotError, status=499): ...


class InternalError(ParrotError, status=500): ...


class CallFailed(ParrotError, status=502): ...


class EngineFailed(CallFailed): ...


class ModelNumerics(EngineFailed): ...


class NativeFunctionFailed(CallFailed): ...


class Unavailable(ParrotError, status=503): ...


class NoEngine(Unavailable): ...


class OutOfMemory(Unavailable): ...


class Standby(Unavailable): ...


class TimedOut(ParrotError, status=504): ...


class InsufficientStorage(ParrotError, status=507): ...


def _walk(root: type[ParrotError]) -> list[type[ParrotError]]:
    return [root, *(cls for sub in root.__subclasses__() for cls in _walk(sub))]


_BY_TYPE = {cls.type: cls for cls in _walk(ParrotError)}
_BY_STATUS = {  # The class nearest to the root for each status.
    status: min(
        (c for c in _walk(ParrotError)[1:] if c.status == status), key=lambda c: len(c.__mro__)
    )
    for status in {cls.status for cls in ParrotError.__subclasses__()}
}


def error_from_payload(payload: object, status: int) -> ParrotError:
    """The error in a server's response. For a body without a Parrot error, the status decides the
    class."""
    error = payload.get("error") if isinstance(payload, Mapping) else None
    if not isinstance(error, Mapping):
        return _BY_STATUS.get(status, InternalError)(f"HTTP {status} without a Parrot error body")
    message, kind, param = error.get("message"), error.get("type"), error.get("param")
    cls = _BY_TYPE.get(kind) if isinstance(kind, str) else None
    return (cls or _BY_STATUS.get(status, InternalError))(
        message if isinstance(message, str) else f"HTTP {status}",
        param=param if isinstance(param, str) else None,
    )
