"""Reports damaged files of models."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)


@contextmanager
def usable(source: str) -> Iterator[None]:
    """Context that converts errors of reading a model's files to `ConfigError`.

    Malformed files can make the libraries raise any exception."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        logger.debug("%s", source, exc_info=True)
        raise ConfigError(f"{source}: not a usable model: {error!r:.500}") from None
