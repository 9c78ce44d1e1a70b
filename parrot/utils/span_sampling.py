"""Which traces are exported, as OpenTelemetry's samplers decide it."""

from collections.abc import Mapping
from dataclasses import dataclass

from parrot.utils.config import ConfigError
from parrot.utils.traceparent import TraceParent, new_trace_id

_NAME, _ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_PARENT_BASED = "parentbased_"
_KINDS = ("always_on", "always_off", "traceidratio")
_BITS = 64  # of a trace's id, which decide


@dataclass(frozen=True, slots=True)
class Sampler:
    """Takes a share of the traces, 0 to 1, by their ids: samplers with the same share take the same
    traces. `obeys_callers`: a span with a caller's span above it is taken if that one is."""

    share: float = 1.0
    obeys_callers: bool = True

    def takes(self, trace_id: str, caller: TraceParent | None) -> bool:
        if caller is not None and self.obeys_callers:
            return caller.is_sampled
        return int(trace_id, 16) % (1 << _BITS) < round(self.share * (1 << _BITS))

    def trace_of(self, traceparent: str | None) -> str:
        """The trace that something is in whose caller says this, its caller's or a new one; empty
        if it is not taken."""
        caller = TraceParent.parse(traceparent)
        trace_id = new_trace_id() if caller is None else caller.trace_id
        return trace_id if self.takes(trace_id, caller) else ""

    def judged(self, caller: TraceParent) -> TraceParent:
        """The caller's span, marked as sampled if what is below it is taken."""
        return caller._replace(is_sampled=self.takes(caller.trace_id, caller))


def sampler_of(share: float | None, environ: Mapping[str, str]) -> Sampler:
    """The sampler that takes `share` and obeys callers, or, if that is None, the one that the
    environment names; else one that takes all. Raises `ConfigError`."""
    if share is not None:
        return Sampler(share)
    name = environ.get(_NAME) or f"{_PARENT_BASED}always_on"
    kind = name.removeprefix(_PARENT_BASED)
    if kind not in _KINDS:
        known = ", ".join([*_KINDS, *(_PARENT_BASED + kind for kind in _KINDS)])
        raise ConfigError(f"{_NAME}: {name!r:.80} is none of {known}")
    share = _share(environ) if kind == "traceidratio" else float(kind == "always_on")
    return Sampler(share, obeys_callers=name.startswith(_PARENT_BASED))


def _share(environ: Mapping[str, str]) -> float:
    text = environ.get(_ARGUMENT) or "1"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{_ARGUMENT}: {text!r:.80} is no number from 0 to 1")
    return share
