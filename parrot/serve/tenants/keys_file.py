"""The file of keys: for each its digest, what it is for, and what its tenant may have."""

import os
import stat
from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from parrot.serve.tenants.tenant import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    PUBLIC_ID,
    Scope,
    Tenant,
    TenantLimits,
)
from parrot.utils.config import ConfigError, ConfigModel, parse_config, parse_config_object

MAX_KEYS = 1024
_MAX_BYTES = 2**18
_RESERVED = frozenset({PUBLIC_ID, "operator", "other"})

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]


class KeyEntry(ConfigModel):
    """One key, and the tenant whose it is. `parrot keys` adds and removes them."""

    id: _Name = Field(description="The tenant's name, as logs, metrics and the page show it.")
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the key, in hexadecimal."
    )
    scopes: tuple[Scope, ...] = Field(
        (Scope.USER,),
        min_length=1,
        description="What the key is for: `user`, sessions and requests of its own; `admin`, the "
        "operator's routes; `metrics`, those of the whole service.",
    )
    weight: float = Field(
        1.0,
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        description="Its share of the service beside other tenants'.",
    )
    share_group: _Name | None = Field(
        None,
        description="Tenants with the same name here share what is cached of prompts and results, "
        "so each may learn what the others sent; null: it shares with nobody.",
    )
    limits: TenantLimits = Field(TenantLimits(), description="What the tenant may have.")

    def tenant(self) -> Tenant:
        return Tenant(self.id, self.weight, self.share_group, frozenset(self.scopes), self.limits)


def read_keys(path: str) -> list[KeyEntry]:
    """The entries of a file, JSON or (by its name) YAML: `{"keys": [...]}`. Raises `ConfigError`
    for a file that others can write, and with every problem that is in it."""
    return parse_keys(_read(path), path)


def parse_keys(raw: bytes, path: str) -> list[KeyEntry]:
    """The entries in the bytes of this file. Raises `ConfigError`."""
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{path}: has more than {_MAX_BYTES} bytes")
    payload = parse_config_object(raw, path)
    given = payload.pop("keys", None)
    if payload or not isinstance(given, list) or len(given) > MAX_KEYS:
        raise ConfigError(f"{path}: must hold `keys`, a list of at most {MAX_KEYS}, and no more")
    entries: list[KeyEntry] = []
    problems: list[str] = []
    taken: set[str] = set()
    for number, fields in enumerate(given):
        try:
            entry = _entry(f"{path}: keys.{number}", fields)
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems += _clashes(f"{path}: keys.{number}", entry, taken)
            taken |= {entry.id, entry.sha256}
            entries.append(entry)
    if problems:
        raise ConfigError("\n".join(problems))
    return entries


def facts_of(path: str) -> object:
    """The facts that differ when the file was changed; None if it is not there."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_mode


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{path}: is no file")
            if stat.S_IMODE(facts.st_mode) & 0o022:
                raise ConfigError(
                    f"{path}: others can write it, and so make keys: chmod go-w {path}"
                )
            return file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _entry(place: str, fields: Any) -> KeyEntry:
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: must be an object with `id` and `sha256`")
    return parse_config(KeyEntry, fields, place)


def _clashes(place: str, entry: KeyEntry, taken: Set[str]) -> list[str]:
    """`taken`: the ids and digests of earlier entries, which differ in length."""
    problems = []
    if entry.id in _RESERVED:
        problems.append(f"{place}: `id`: {entry.id} has a meaning of its own")
    if entry.id in taken:
        problems.append(f"{place}: `id`: {entry.id} is there twice")
    if entry.sha256 in taken:
        problems.append(f"{place}: `sha256`: another entry has this key")
    return problems
