"""Changes of the keys file: `parrot keys` writes them, and a running ServeCore reads them."""

import asyncio
import fcntl
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from parrot.serve.tenants.table import (
    MAX_KEYS,
    KeyEntry,
    KeysChange,
    TenantTable,
    facts_of,
    parse_keys,
    read_keys,
)
from parrot.utils.clock import Clock
from parrot.utils.config import ConfigError, is_yaml, parse_config
from parrot.utils.ids import new_token

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""Seconds between two checks of the file. A check is one system call and reads no data."""

_PREFIX = "pk-"  # It lets people and secret scanners recognize a key.


def add_key(path: Path, fields: dict[str, Any]) -> str:
    """Add an entry with these fields, and return its new random key, which the file does not
    contain. The file is created if it is missing. Raises `ConfigError`."""
    key = _PREFIX + new_token() + new_token()
    digest = sha256(key.encode()).hexdigest()
    entry = parse_config(KeyEntry, {**fields, "sha256": digest}, "the new key")
    with _changing(path):
        entries = read_keys(str(path)) if path.exists() else []
        if any(entry.id == other.id for other in entries):
            raise ConfigError(f"{path}: {entry.id} already has a key; remove it first")
        if len(entries) == MAX_KEYS:
            raise ConfigError(f"{path}: has {MAX_KEYS} keys, the maximum")
        _write(path, [*entries, entry])
    return key


def remove_key(path: Path, tenant_id: str) -> None:
    """Remove the tenant's key. Raises `ConfigError`, also if the tenant has no key."""
    with _changing(path):
        entries = read_keys(str(path))
        rest = [entry for entry in entries if entry.id != tenant_id]
        if len(rest) == len(entries):
            raise ConfigError(f"{path}: has no key of {tenant_id}")
        _write(path, rest)


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Lock the file's folder for one process. Raises `ConfigError` if it cannot be written."""
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
    """Replace the file atomically, and keep its mode and owner. Raises `ConfigError` for entries
    that ServeCore would reject."""
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


class KeysWatch:
    """Reads the keys file after each change. An invalid file changes nothing and is logged once."""

    def __init__(
        self,
        table: TenantTable,
        clock: Clock,
        on_change: Callable[[KeysChange], Awaitable[None]],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._table = table
        self._clock = clock
        self._on_change = on_change
        self._on_trouble = on_trouble
        self._trouble = ""

    async def run(self) -> None:
        """Check the file until cancelled. Returns at once if there is no keys file."""
        path = self._table.path
        if path is None:
            return
        seen: object = None  # Read the file once more: the table may be old.
        while True:
            facts = facts_of(path)
            if facts != seen:
                seen = facts
                try:
                    await self._take_in(path)
                except Exception:  # Continue, because later changes may withdraw keys.
                    logger.exception("the keys of %s were not applied", path)
                    self._on_trouble("internal error")
            await self._clock.sleep(PERIOD_S)

    async def _take_in(self, path: str) -> None:
        try:
            change = self._table.replace(await asyncio.to_thread(read_keys, path))
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.error("the keys were not changed: %s", error)
                self._on_trouble(str(error))
        else:
            self._trouble = ""
            if any(change):
                logger.info("keys changed: %s", change)
                await self._on_change(change)
