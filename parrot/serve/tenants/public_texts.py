"""The files of texts that operators let all tenants share."""

from collections.abc import Sequence
from pathlib import Path

from parrot.utils.config import ConfigError

_MAX_BYTES = 2**20


def read_texts(paths: Sequence[str]) -> list[str]:
    """Their texts, without the line break at their ends. Raises `ConfigError` for a file that is
    no text of 1 to 1,048,576 bytes."""
    return [_read(path) for path in paths]


def _read(path: str) -> str:
    if not Path(path).is_file():  # a pipe would wait for who writes to it
        raise ConfigError(f"public_prefixes: {path}: is no file")
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"public_prefixes: {path}: cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"public_prefixes: {path}: has more than {_MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ConfigError(f"public_prefixes: {path}: is no UTF-8: {error.reason}") from None
    if not text.strip():
        raise ConfigError(f"public_prefixes: {path}: is empty")
    return text
