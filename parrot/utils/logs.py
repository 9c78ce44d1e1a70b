"""Log formats of the servers: lines of text or of JSON."""

import io
import json
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import orjson

from parrot.utils.private_files import open_private

CALLS = logging.getLogger("parrot.calls")
"""Logs the end of each session and call. Enabled by `--log-calls`."""

# Characters to escape. They can come from an engine's name or a library's error. A line break would
# forge a log line, and a terminal would execute control characters.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MAX_WARNING = 256  # Characters of the last warning. The rest is cut off.
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_call(message: str, **facts: Any) -> None:
    """Log to `CALLS`. Facts that are None are omitted."""
    told = {name: value for name, value in facts.items() if value is not None}
    CALLS.info(message, extra={"facts": told})


class TextFormatter(logging.Formatter):
    """One line with the message and then the facts. The traceback of an error follows, indented."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        line = " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in facts.items())])
        return _escaped(line)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {_escaped(line)}" for line in lines)


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


class LogFile(logging.FileHandler):
    """Appends to a file that only this user can read."""

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(open_private(self.baseFilename, is_new=False), "utf-8")


class LastWarning(logging.Handler):
    """Keeps the last warning or error of the log: its message in one line, and its Unix time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self.at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.text, self.at = _escaped(record.getMessage())[:_MAX_WARNING], record.created

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive what this process logs during the block."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)


class JsonFormatter(logging.Formatter):
    """One JSON object per line. An error has its type and the traceback's locations, but not its
    message, which may contain a program's data."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line["error"] = type(error).__name__
            line["raised"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)
            ]
        try:
            return orjson.dumps(line, default=str).decode()
        except orjson.JSONEncodeError:  # A lone surrogate, for example in a file name.
            return json.dumps(line, default=str)
