"""Small tools that every room may use.

The room owns clocks, timers, tasks, ids, heaps and configuration files. It knows no other room of
the project, and none of its parts needs more than the standard library, orjson and pydantic."""

from parrot.utils.cprofile import cprofile

__all__ = ["cprofile"]
