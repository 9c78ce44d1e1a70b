"""How servers write their logs: lines of text, or of JSON."""

import logging
import traceback
from datetime import UTC, datetime
from typing import Any

import orjson

CALLS = logging.getLogger("parrot.calls")
"""Says how sessions and calls ended, if that is wanted."""

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_call(message: str, **facts: Any) -> None:
    """Log to `CALLS`. Facts that are None are left out."""
    told = {name: value for name, value in facts.items() if value is not None}
    CALLS.info(message, extra={"facts": told})


class TextFormatter(logging.Formatter):
    """One line, with the facts behind the message, and below it the traceback of an error."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in facts.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Of an error it has the type and where it was raised, and not the
    message, which may quote what a program sent."""

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
        return orjson.dumps(line, default=str).decode()
