"""Restores the root logger, for tests that start a server in their own process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unchanged_root_logger() -> Iterator[None]:
    """Restore the handlers and the level of the root logger at the end. Otherwise a handler would
    write to the closed stderr of a finished test, and `logging` would report the failure on
    stderr."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.handlers, root.level = handlers, level
