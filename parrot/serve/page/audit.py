"""The log of what operators and tenants do on the page: who, what, when and from where."""

import logging
import time
from datetime import UTC, datetime
from typing import Any, BinaryIO

import orjson
from starlette.requests import Request

from parrot.utils.config import ConfigError
from parrot.utils.private_files import open_private

logger = logging.getLogger(__name__)


class AuditLog:
    """Lines of JSON in a file that only this user can read; None: nowhere."""

    def __init__(self, path: str | None) -> None:
        """Raises `ConfigError` if it cannot be written."""
        self._file: BinaryIO | None = None
        if path is not None:
            try:
                self._file = open_private(path, is_new=False)
            except OSError as error:
                raise ConfigError(f"audit_path: {path}: {error.strerror}") from None

    def note(self, request: Request, who: str, outcome: str, **facts: Any) -> None:
        """On disk before the request is answered. `outcome`: "ok", or the error's type."""
        if self._file is None:
            return
        line = {
            "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
            "who": who,
            "from": None if request.client is None else request.client.host,
            "what": f"{request.method} {request.url.path[:512]}",
            "outcome": outcome,
            **facts,
        }
        try:
            self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            self._file.flush()
        except OSError as error:
            logger.error("a line of the audit log is lost: %s", error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
