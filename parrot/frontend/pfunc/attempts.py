"""How often a call is tried, and what is called in its place when it fails."""

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
# The next attempt may fare better; with another function also after what is not among these.
_TRANSIENT = (CallFailed, NoEngine, OutOfMemory, QuotaExceeded, TimedOut, ValidationFailed)
_FINAL = (AuthenticationFailed, Cancelled, SessionGone)


@dataclass(frozen=True)
class Attempts:
    """How a function is tried. `retries`: further attempts of a call that fails, or whose output
    is no value of its type. `feed_back`: the attempt after such an output goes on behind it, and is
    told what was wrong. `fallback`: the function that is called when all have failed, with its own.
    `timeout`: the seconds that an attempt has for all its outputs, unless it is the last of all."""

    retries: int = 0
    feed_back: bool = False
    fallback: Signature | None = None
    timeout: float | None = None

    @property
    def are_many(self) -> bool:
        return self.retries > 0 or self.fallback is not None

    def check(self, func: Signature) -> None:
        """Raise `TypeError` or `ValueError` if the function cannot be tried so."""
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
            raise TypeError(f"the fallback must be a function of Parrot, not {self.fallback!r}")
        other = self.fallback
        if len(other.outputs) != len(func.outputs):
            raise ValueError(f"the fallback `{other.name}` has another number of outputs")
        for param in other.inputs:
            if param.is_required and param.name not in func.params_map:
                problem = f"the fallback `{other.name}` needs `{param.name}`"
                raise ValueError(f"{problem}, which `{func.name}` has not")


def may_succeed_again(error: ParrotError) -> bool:
    """Whether the same call may fare better another time."""
    return isinstance(error, _TRANSIENT) and not isinstance(error, NativeFunctionFailed)


def is_final(error: ParrotError) -> bool:
    """Whether no call could succeed."""
    return isinstance(error, _FINAL)
