"""Small tools that every room may use.

The room owns clocks, timers, tasks, ids, heaps, configuration files and the text of metrics. It
knows no other room of the project, and none of its parts needs more than the standard library,
orjson, pydantic and prometheus-client."""

from parrot.utils.cprofile import cprofile

__all__ = ["cprofile"]
