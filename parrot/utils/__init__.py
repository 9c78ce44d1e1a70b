"""Small tools that every package of the project may import: clocks, timers, tasks, ids, heaps,
configuration files and metrics.

This package imports no other package of the project. Its modules need only the standard library,
orjson, pydantic, prometheus-client and PyYAML. `spans.py` also needs the extra `otel`."""

from parrot.utils.cprofile import cprofile

__all__ = ["cprofile"]
