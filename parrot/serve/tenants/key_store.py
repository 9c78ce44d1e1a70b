"""Changes of the file of keys, as `parrot keys` makes them."""

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from parrot.serve.tenants.keys_file import MAX_KEYS, KeyEntry, parse_keys, read_keys
from parrot.utils.config import ConfigError, is_yaml, parse_config
from parrot.utils.ids import new_token

_PREFIX = "pk-"  # so that people and scanners of secrets know one when they see it


def add_key(path: Path, fields: dict[str, Any]) -> str:
    """A new random key for an entry with these fields, which is added without it. The file is made
    if it is missing. Raises `ConfigError`."""
    key = _PREFIX + new_token() + new_token()
    digest = sha256(key.encode()).hexdigest()
    entry = parse_config(KeyEntry, {**fields, "sha256": digest}, "the new key")
    with _changing(path):
        entries = read_keys(str(path)) if path.exists() else []
        if any(entry.id == other.id for other in entries):
            raise ConfigError(f"{path}: {entry.id} has a key; remove it first")
        if len(entries) == MAX_KEYS:
            raise ConfigError(f"{path}: has {MAX_KEYS} keys, which is the most")
        _write(path, [*entries, entry])
    return key


def remove_key(path: Path, tenant_id: str) -> None:
    """Raises `ConfigError`, also if there is none."""
    with _changing(path):
        entries = read_keys(str(path))
        rest = [entry for entry in entries if entry.id != tenant_id]
        if len(rest) == len(entries):
            raise ConfigError(f"{path}: has no key of {tenant_id}")
        _write(path, rest)


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Let one process in at a time. Raises `ConfigError` if the file cannot be written."""
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _write(path: Path, entries: Sequence[KeyEntry]) -> None:
    """All of it or nothing, with the mode and the owner that the file has. Raises `ConfigError` for
    what ServeCore would not take."""
    payload = {"keys": [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]}
    if is_yaml(path):
        import yaml

        raw = yaml.safe_dump(payload, sort_keys=False).encode()
    else:
        raw = orjson.dumps(payload, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    parse_keys(raw, str(path))
    draft = path.with_name(f".{path.name}.{new_token()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if path.exists():
                facts = path.stat()
                with suppress(PermissionError):
                    os.fchown(file.fileno(), facts.st_uid, facts.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(facts.st_mode))
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
