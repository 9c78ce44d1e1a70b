"""The retries and the fallback of a function."""

from dataclasses import dataclass

from parrot.frontend.pfunc.function_body import Signature
from parrot.protocol.errors import (
    AuthenticationFailed,
    CallFailed,
    Cancelled,
    NativeFunctionFailed,
    NoEngine,
    OutOfMemory,
    ParrotError,
    QuotaExceeded,
    SessionGone,
    TimedOut,
    ValidationFailed,
)

_MAX_RETRIES = 20
_MAX_TIMEOUT_S = 86_400.0
# Errors after which the same call may succeed. A fallback also runs after other errors.
_TRANSIENT = (CallFailed, NoEngine, OutOfMemory, QuotaExceeded, TimedOut, ValidationFailed)
_FINAL = (AuthenticationFailed, Cancelled, SessionGone)


@dataclass(frozen=True)
class Attempts:
    """The attempts of a call."""

    retries: int = 0  # Further attempts if a call fails, or an output is not valid for its type.
    feed_back: bool = False  # A retry continues the invalid output and its prompt names the error.
    fallback: Signature | None = None  # Called with its own attempts when all attempts failed.
    timeout: float | None = None  # Seconds for all outputs of an attempt, except the last attempt.

    @property
    def are_many(self) -> bool:
        return self.retries > 0 or self.fallback is not None

    def check(self, func: Signature) -> None:
        """Raises `TypeError` or `ValueError` if these options do not fit the function."""
        if isinstance(self.retries, bool) or not isinstance(self.retries, int):
            raise TypeError(f"retries must be a number, not {self.retries!r}")
        if not 0 <= self.retries <= _MAX_RETRIES:
            raise ValueError(f"retries must be in 0 ... {_MAX_RETRIES}")
        if self.feed_back and (self.retries == 0 or len(func.outputs) != 1):
            raise ValueError("feed_back needs retries, and a function with one output")
        if self.timeout is not None and not (self.are_many and 0 < self.timeout <= _MAX_TIMEOUT_S):
            raise ValueError(
                f"attempt_timeout needs retries or a fallback, and at most {_MAX_TIMEOUT_S:g} s"
            )
        if self.fallback is None:
            return
        if not isinstance(self.fallback, Signature):
            raise TypeError(
                f"the fallback must be a semantic or native function, not {self.fallback!r}"
            )
        other = self.fallback
        if len(other.outputs) != len(func.outputs):
            raise ValueError(
                f"fallback `{other.name}` has {_outputs(other)}, but `{func.name}` has "
                f"{_outputs(func)}; both must match"
            )
        for param in other.inputs:
            if param.is_required and param.name not in func.params_map:
                problem = f"the fallback `{other.name}` needs `{param.name}`"
                raise ValueError(f"{problem}, but `{func.name}` has no such parameter")


def _outputs(func: Signature) -> str:
    return f"{(number := len(func.outputs))} output{'s' * (number != 1)}"


def may_succeed_again(error: ParrotError) -> bool:
    """Whether the same call may succeed in another attempt."""
    return isinstance(error, _TRANSIENT) and not isinstance(error, NativeFunctionFailed)


def is_final(error: ParrotError) -> bool:
    """Whether the error ends all attempts, including the fallback."""
    return isinstance(error, _FINAL)
