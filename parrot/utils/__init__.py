"""Small tools that every room may use.

The room owns clocks, timers, tasks, ids, heaps, configuration files and the text of metrics. It
knows no other room of the project. Its parts need only the standard library, orjson, pydantic,
prometheus-client and PyYAML, except `spans.py`, which needs the extra `otel`."""

from parrot.utils.cprofile import cprofile

__all__ = ["cprofile"]
