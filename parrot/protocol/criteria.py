"""Performance that the reader of a variable wants from the service."""

from enum import StrEnum


class PerformanceCriteria(StrEnum):
    """`LATENCY`: this value soon. `THROUGHPUT`: many such values cheaply. `TTFT`: its first token
    soon. `TPOT`: its tokens at a steady, fast pace."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    TTFT = "TTFT"
    TPOT = "TPOT"

    @classmethod
    def _missing_(cls, value: object) -> "PerformanceCriteria | None":
        """Accept any letter case on the wire ("ttft", "Latency")."""
        if isinstance(value, str):
            return next((c for c in cls if c.value.lower() == value.lower()), None)
        return None
